// sanitizer.h - what the emulator tells AddressSanitizer and ThreadSanitizer; nothing in a plain
// build. For ThreadSanitizer the emulator itself is compiled without -fsanitize=thread, with
// EMU_TSAN: its own work is no part of the program that is checked.
#ifndef EMU_SANITIZER_H
#define EMU_SANITIZER_H

#include <stddef.h>

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define EMU_ASAN 1
#endif
#elif defined(__SANITIZE_ADDRESS__)
#define EMU_ASAN 1
#endif
#ifndef EMU_ASAN
#define EMU_ASAN 0
#endif
#ifndef EMU_TSAN
#define EMU_TSAN 0
#endif

#if EMU_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#if EMU_TSAN
#include <sanitizer/tsan_interface.h>
extern "C" {
void AnnotateIgnoreReadsBegin(const char *file, int line);
void AnnotateIgnoreReadsEnd(const char *file, int line);
void AnnotateIgnoreWritesBegin(const char *file, int line);
void AnnotateIgnoreWritesEnd(const char *file, int line);
void __tsan_read_range(void *address, unsigned long size);
void __tsan_write_range(void *address, unsigned long size);
}
#endif

namespace emu
{

#if EMU_ASAN
inline void asan_poison(void *ptr, size_t size)
{
    __asan_poison_memory_region(ptr, size);
}

inline void asan_unpoison(void *ptr, size_t size)
{
    __asan_unpoison_memory_region(ptr, size);
}
#else
inline void asan_poison(void *, size_t)
{
}

inline void asan_unpoison(void *, size_t)
{
}
#endif

#if EMU_TSAN
inline void tsan_acquire(void *tag)
{
    __tsan_acquire(tag);
}

inline void tsan_release(void *tag)
{
    __tsan_release(tag);
}

inline void tsan_reads(const void *ptr, size_t size)
{
    __tsan_read_range(const_cast<void *>(ptr), size);
}

inline void tsan_writes(void *ptr, size_t size)
{
    __tsan_write_range(ptr, size);
}

// While one lives, memory that the emulator allocates for itself does not count.
struct tsan_silence {
    tsan_silence()
    {
        AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
        AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
    }
    ~tsan_silence()
    {
        AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
        AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
    }
};
#else
inline void tsan_acquire(void *)
{
}

inline void tsan_release(void *)
{
}

inline void tsan_reads(const void *, size_t)
{
}

inline void tsan_writes(void *, size_t)
{
}

struct tsan_silence {
    tsan_silence()
    {
    }
};
#endif

} // namespace emu

#endif
