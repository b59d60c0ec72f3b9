// fiber.cc - the threads of a kernel as fibers: their stacks and the switch between them.
#include <pthread.h>
#include <sys/mman.h>

#include "machine.h"

#if !defined(__x86_64__) && !defined(EMU_UCONTEXT)
#define EMU_UCONTEXT // also by hand, to try it elsewhere
#endif

#ifdef EMU_UCONTEXT
#include <ucontext.h>
#else
extern "C" void emu_switch(void **save, void *to);
// Saves what a function must preserve, on the stack, and returns on the other stack.
asm(R"(
.text
.globl emu_switch
.type emu_switch, @function
emu_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size emu_switch, .-emu_switch
)");
#endif

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

#if EMU_ASAN
// Stacks that move between fibers are not what this check expects.
extern "C" const char *__asan_default_options()
{
    return "detect_stack_use_after_return=0";
}
#elif EMU_TSAN
// By default a process with a second thread, here the watchdog, sleeps for a second at its end.
extern "C" const char *__tsan_default_options()
{
    return "atexit_sleep_ms=0";
}
#endif

namespace emu
{
namespace
{

constexpr size_t stack_size = 256 << 10, guard_size = 4096;

fiber host;
// Never destroyed, so that what they hold is not a leak.
auto &idle = *new std::vector<fiber *>;
auto &all = *new std::vector<fiber *>;

#ifndef EMU_UCONTEXT
void swap_context(void **save, void *to)
{
    emu_switch(save, to);
}

void *make_context(fiber *f, void (*entry)())
{
    // Six registers, the entry and a null return address: the stack is as at a call.
    void **top = reinterpret_cast<void **>(f->stack + f->stack_size);
    *--top = nullptr;
    *--top = reinterpret_cast<void *>(entry);
    for (int i = 0; i < 6; i++)
        *--top = nullptr;
    return top;
}
#else
void swap_context(void **save, void *to)
{
    ucontext_t here;
    *save = &here;
    swapcontext(&here, static_cast<ucontext_t *>(to));
}

void *make_context(fiber *f, void (*entry)())
{
    ucontext_t *context = new ucontext_t;
    getcontext(context);
    context->uc_stack.ss_sp = f->stack;
    context->uc_stack.ss_size = f->stack_size;
    context->uc_link = nullptr;
    makecontext(context, entry, 0);
    return context;
}
#endif

void arrive([[maybe_unused]] fiber *f)
{
#if EMU_ASAN
    __sanitizer_finish_switch_fiber(f->asan_stack, nullptr, nullptr);
#endif
}

// A fiber runs one thread after the other.
void fiber_main()
{
    arrive(current);
    for (;;)
        run_thread();
}

fiber *make_fiber()
{
    fiber *f = new fiber();
    void *memory = mmap(nullptr, stack_size + guard_size, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED || mprotect(memory, guard_size, PROT_NONE))
        fail(nowhere, "no memory for the stack of a thread");
    f->stack = static_cast<uint8_t *>(memory) + guard_size;
    f->stack_size = stack_size;
    f->stack_pointer = make_context(f, fiber_main);
#if EMU_TSAN
    f->tsan_fiber = __tsan_create_fiber(0);
#endif
    all.push_back(f);
    return f;
}

} // namespace

fiber *current = &host;

bool in_kernel()
{
    return current->home != nullptr;
}

// ThreadSanitizer takes accesses of one fiber as ordered: there threads with the same number in two
// blocks should not get the same one. The choice has its own numbers, so that schedules do not
// depend on it.
fiber *take_fiber()
{
    static uint32_t choice;

    if (idle.size() < (EMU_TSAN ? warp_size : 1))
        return make_fiber();
    choice = choice * 1664525 + 1013904223;
    if (EMU_TSAN)
        std::swap(idle.back(), idle[(choice >> 8) % idle.size()]);
    fiber *f = idle.back();
    idle.pop_back();
    return f;
}

void return_fiber(fiber *f)
{
    idle.push_back(f);
}

// The host thread that will run a grid.
void enter_host()
{
#if EMU_ASAN
    pthread_attr_t attributes;
    void *stack;
    pthread_getattr_np(pthread_self(), &attributes);
    pthread_attr_getstack(&attributes, &stack, &host.stack_size);
    pthread_attr_destroy(&attributes);
    host.stack = static_cast<uint8_t *>(stack);
#endif
#if EMU_TSAN
    host.tsan_fiber = __tsan_get_current_fiber();
#endif
}

void switch_to_host()
{
    switch_to(&host);
}

void switch_to(fiber *to)
{
    fiber *from = current;

    stats.switches++;
    current = to;
    if (to->home) {
        threadIdx = to->index;
        blockIdx = to->home->index;
    }
#if EMU_ASAN
    __sanitizer_start_switch_fiber(&from->asan_stack, to->stack, to->stack_size);
#endif
#if EMU_TSAN
    __tsan_switch_to_fiber(to->tsan_fiber, __tsan_switch_to_fiber_no_sync);
#endif
    swap_context(&from->stack_pointer, to->stack_pointer);
    arrive(from);
}

bool is_stack_guard(const void *ptr)
{
    for (const fiber *f : all)
        if (ptr < f->stack && ptr >= f->stack - guard_size)
            return true;
    return false;
}

} // namespace emu
