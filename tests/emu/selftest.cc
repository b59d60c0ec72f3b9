// selftest.cc - runs the emulator's tests, each case in a process of its own.
//   emu_selftest --list           names of groups and cases
//   emu_selftest CASE             that case, in this process
//   emu_selftest --run GROUP N    all cases of a group: those that have to pass with each of the
//   seeds
//                                 1 to N, mistakes until one of the seeds shows them
#include "selftest.h"

#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <string>

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define BUILD asan
#elif __has_feature(thread_sanitizer)
#define BUILD tsan
#endif
#elif defined(__SANITIZE_ADDRESS__)
#define BUILD asan
#elif defined(__SANITIZE_THREAD__)
#define BUILD tsan
#endif
#ifndef BUILD
#define BUILD plain
#endif

static const struct {
    const char *name;
    const test_group *cases;
} groups[] = {{"fragments", &fragment_cases},
              {"half", &half_cases},
              {"programs", &program_cases},
              {"runtime", &runtime_cases},
              {"faults", &fault_cases}};

struct outcome {
    int status;
    std::string text;
};

// Runs this program again with the case and the seed; text is what it wrote to stderr.
static outcome run_process(const char *name, int seed)
{
    outcome result{0, ""};
    int ends[2];

    if (pipe(ends)) {
        perror("pipe");
        exit(2);
    }
    fflush(stdout);
    const pid_t child = fork();
    if (child < 0) {
        perror("fork");
        exit(2);
    }
    if (child == 0) {
        dup2(ends[1], 2);
        close(ends[0]);
        close(ends[1]);
        setenv("KVC_EMU_SEED", std::to_string(seed).c_str(), 1);
        execl("/proc/self/exe", "emu_selftest", name, static_cast<char *>(nullptr));
        _exit(127);
    }
    close(ends[1]);
    char buffer[4096];
    for (ssize_t n; (n = read(ends[0], buffer, sizeof(buffer))) > 0;)
        result.text.append(buffer, size_t(n));
    close(ends[0]);
    waitpid(child, &result.status, 0);
    return result;
}

static bool holds_one(const std::string &text, const char *parts)
{
    for (;;) {
        const char *end = strchrnul(parts, '|');
        if (text.find(std::string(parts, end)) != std::string::npos)
            return true;
        if (!*end)
            return false;
        parts = end + 1;
    }
}

static bool passes(const test_case &test, int n_seeds)
{
    for (int seed = 1; seed <= n_seeds; seed++) {
        const outcome result = run_process(test.name, seed);
        if (result.status == 0 && result.text.empty())
            continue;
        printf("FAILED %s, seed %d, status %x:\n%s\n", test.name, seed, result.status,
               result.text.c_str());
        return false;
    }
    printf("ok     %s\n", test.name);
    return true;
}

static bool is_seen(const test_case &test, int n_seeds)
{
    outcome result{0, ""};

    if (!(test.builds & BUILD)) {
        printf("-      %s\n", test.name);
        return true;
    }
    for (int seed = 1; seed <= n_seeds; seed++) {
        result = run_process(test.name, seed);
        if (result.status != 0 && holds_one(result.text, test.expected)) {
            printf("seen   %s, seed %d\n", test.name, seed);
            return true;
        }
    }
    printf("MISSED %s, \"%s\" was expected; status %x:\n%s\n", test.name, test.expected,
           result.status, result.text.c_str());
    return false;
}

static int run_group(const char *name, int n_seeds)
{
    int n_bad = 0, n_run = 0;

    for (const auto &group : groups)
        for (const test_case &test : *group.cases)
            if (strcmp(group.name, name) == 0) {
                n_run++;
                n_bad += !(test.expected ? is_seen(test, n_seeds) : passes(test, n_seeds));
            }
    printf("%s: %d cases, %d failed\n", name, n_run, n_bad);
    return n_run == 0 || n_bad > 0;
}

static int run_case(const char *name)
{
    for (const auto &group : groups)
        for (const test_case &test : *group.cases)
            if (strcmp(test.name, name) == 0) {
                test.run();
                emu_check_leaks();
                return 0;
            }
    fprintf(stderr, "there is no case %s\n", name);
    return 2;
}

int main(int argc, char **argv)
{
    if (argc == 4 && strcmp(argv[1], "--run") == 0)
        return run_group(argv[2], atoi(argv[3]));
    if (argc == 2 && strcmp(argv[1], "--list") != 0)
        return run_case(argv[1]);
    for (const auto &group : groups)
        for (const test_case &test : *group.cases)
            printf("%s %s\n", group.name, test.name);
    return 0;
}
