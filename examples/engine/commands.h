/* The commands of kvc-engine. Each parses its arguments, does its work and returns the exit status.
 */
#ifndef ENGINE_COMMANDS_H
#define ENGINE_COMMANDS_H

enum { EXIT_DONE = 0, EXIT_FAILED = 1, EXIT_USAGE = 2 };

int generate_command(int argc, char **argv);
int calibrate_command(int argc, char **argv);
int sensitivity_command(int argc, char **argv);
int tokens_command(int argc, char **argv);
int compare_command(int argc, char **argv);
int long_command(int argc, char **argv);
int vqa_command(int argc, char **argv);
int exam_command(int argc, char **argv);

/* calibrate_command() under the name of another program. */
int observe_as(const char *program, int argc, char **argv);

#endif
