// stream.cc - streams, events, graphs, copies and launches. Work waits in its stream until the host
// waits for something; then streams advance in random order, as far as events allow.
#include <deque>
#include <memory>
#include <mutex>
#include <set>
#include <thread>

#include "machine.h"

namespace
{

using task = std::function<void()>;

struct event_state {
    uint64_t recorded = 0, done = 0; // versions
    uint64_t capture = 0;            // that recorded it last; 0 for none
};

enum class step { work, record, wait };

struct operation {
    step kind;
    task work;
    std::shared_ptr<event_state> event;
    uint64_t version;
    uint64_t order; // in which the host gave it
};

struct stream_capture {
    uint64_t id;
    cudaStreamCaptureMode mode;
    std::thread::id owner;
    bool valid;
    std::vector<task> nodes;
};

} // namespace

struct CUstream_st {
    std::deque<operation> queue;
    bool blocking = true; // takes turns with the legacy stream
    bool destroyed = false;
    std::unique_ptr<stream_capture> capture;
};

struct CUevent_st {
    std::shared_ptr<event_state> state = std::make_shared<event_state>();
    bool timed = true;
};

struct CUgraph_st {
    std::vector<task> nodes;
};

struct CUgraphExec_st {
    std::vector<task> nodes;
};

namespace emu
{
namespace
{

constexpr size_t max_parameter_bytes = 4096;

std::recursive_mutex mutex;
// Never destroyed, so that what is left at the end of a process does not matter.
CUstream_st &legacy = *new CUstream_st;
auto &streams = *new std::vector<CUstream_st *>{&legacy};
auto &events = *new std::set<cudaEvent_t>;
size_t n_live_graphs;
uint64_t n_operations, n_captures;

CUstream_st *find_stream(cudaStream_t handle)
{
    if (!handle || handle == cudaStreamLegacy)
        return &legacy;
    for (CUstream_st *s : streams)
        if (s == handle && !s->destroyed)
            return s;
    fail(nowhere, "use of a stream that was destroyed or never made");
}

CUevent_st *find_event(cudaEvent_t handle)
{
    if (events.count(handle) == 0)
        fail(nowhere, "use of an event that was destroyed or never made");
    return handle;
}

bool is_next(const CUstream_st &s)
{
    if (s.queue.empty())
        return false;
    const operation &front = s.queue.front();
    if (front.kind == step::wait && front.event->done < front.version)
        return false;
    // The legacy stream and the blocking ones see each other's work in the host's order.
    for (const CUstream_st *other : streams)
        if (other != &s && s.blocking && other->blocking && (&s == &legacy || other == &legacy) &&
            !other->queue.empty() && other->queue.front().order < front.order)
            return false;
    return true;
}

void run_front(CUstream_st *s)
{
    const operation front = std::move(s->queue.front());

    s->queue.pop_front();
    if (front.kind == step::record)
        front.event->done = std::max(front.event->done, front.version);
    else if (front.kind == step::work && !device_error())
        front.work();
}

void forget_destroyed()
{
    for (size_t i = streams.size(); i-- > 0;)
        if (streams[i]->destroyed && streams[i]->queue.empty()) {
            delete streams[i];
            streams.erase(streams.begin() + long(i));
        }
}

// One operation of any stream; false if there is none.
bool run_any()
{
    std::vector<CUstream_st *> next;

    for (CUstream_st *s : streams)
        if (is_next(*s))
            next.push_back(s);
    if (next.empty())
        return false;
    run_front(next[random_below(uint32_t(next.size()))]);
    return true;
}

template <class F> void run_until(F done, const char *who)
{
    while (!done())
        if (!run_any())
            fail(nowhere, "%s: all streams wait", who);
    close_device();
    forget_destroyed();
}

// The host waits.
template <class F> cudaError_t wait(F done, const char *who)
{
    stats.syncs++;
    run_until(done, who);
    return device_error();
}

cudaError_t wait_for_stream(const CUstream_st *s, const char *who)
{
    return wait([s] { return s->queue.empty(); }, who);
}

// The host looks: does one step of some stream, so that a loop around it ends.
template <class F> cudaError_t ask(F done)
{
    if (!done())
        run_any();
    close_device();
    const cudaError_t error = device_error();
    return error ? error : done() ? cudaSuccess : cudaErrorNotReady;
}

bool is_done(const event_state &state)
{
    return state.done >= state.recorded;
}

void invalidate(CUstream_st *s)
{
    s->capture->valid = false;
}

cudaError_t append(CUstream_st *s, step kind, task work, std::shared_ptr<event_state> event,
                   uint64_t version)
{
    cudaError_t error = cudaSuccess;

    for (CUstream_st *other : streams)
        if (s == &legacy && other->capture && other->blocking) {
            invalidate(other);
            error = cudaErrorStreamCaptureImplicit;
        }
    if (!error)
        s->queue.push_back({kind, std::move(work), std::move(event), version, ++n_operations});
    return error;
}

bool is_launchable(const dim3 &grid, const dim3 &block)
{
    const uint64_t n_threads = uint64_t(block.x) * block.y * block.z;

    return grid.x > 0 && grid.y > 0 && grid.z > 0 && grid.x <= INT32_MAX && grid.y <= UINT16_MAX &&
           grid.z <= UINT16_MAX && n_threads > 0 && n_threads <= max_block_threads && block.z <= 64;
}

// The first argument of a launch as it is written.
std::string first_argument(const char *text)
{
    int depth = 0;
    const char *end = text;

    for (; *end && (*end != ',' || depth > 0); end++)
        depth += strchr("<([{", *end) ? 1 : strchr(">)]}", *end) ? -1 : 0;
    return std::string(text, end);
}

void run_kernel(const kernel_launch &k)
{
    for (size_t i = 0; i < k.pointers.size(); i++)
        if (k.pointers[i] && !is_allocated(k.pointers[i], 0) && !is_pinned(k.pointers[i]))
            fail(nowhere, "parameter %zu of kernel %s, %p, is not in device memory", i + 1,
                 k.name.c_str(), const_cast<const void *>(k.pointers[i]));
    open_device();
    run_grid(k);
    check_red_zones();
}

struct copy_job {
    const char *who;
    uint8_t *dst;
    const uint8_t *src;
    size_t dst_pitch, src_pitch, width, height;
    bool to_device, from_device;
};

size_t extent(size_t pitch, size_t width, size_t height)
{
    return height ? (height - 1) * pitch + width : 0;
}

void check_copy(const copy_job &j)
{
    const size_t dst_size = extent(j.dst_pitch, j.width, j.height);
    const size_t src_size = extent(j.src_pitch, j.width, j.height);

    if ((j.to_device && !is_allocated(j.dst, dst_size)) ||
        (j.from_device && !is_allocated(j.src, src_size)))
        fail(nowhere, "%s of %zu bytes leaves its device allocation", j.who,
             j.to_device ? dst_size : src_size);
}

void run_copy(const copy_job &j)
{
    check_copy(j);
    const device_range dst(j.dst, extent(j.dst_pitch, j.width, j.height));
    const device_range src(j.src, extent(j.src_pitch, j.width, j.height));
    (j.from_device ? j.to_device ? stats.copies_on_device : stats.copies_to_host
                   : stats.copies_to_device)++;
    for (size_t i = 0; i < j.height; i++)
        memmove(j.dst + i * j.dst_pitch, j.src + i * j.src_pitch, j.width);
}

cudaError_t push_copy(const char *who, void *dst, size_t dst_pitch, const void *src,
                      size_t src_pitch, size_t width, size_t height, cudaMemcpyKind kind,
                      cudaStream_t stream)
{
    static const char *const kinds[] = {"host to host", "host to device", "device to host",
                                        "device to device", "found from the pointers"};
    const copy_job job = {who,
                          static_cast<uint8_t *>(dst),
                          static_cast<const uint8_t *>(src),
                          dst_pitch,
                          src_pitch,
                          width,
                          height,
                          on_device(dst),
                          on_device(src)};
    const int is = job.from_device * 2 + job.to_device;

    if (width > dst_pitch || width > src_pitch || kind < 0 || kind > cudaMemcpyDefault)
        return cudaErrorInvalidValue;
    if (width == 0 || height == 0)
        return cudaSuccess;
    if (kind != cudaMemcpyDefault && int(kind) != is)
        fail(nowhere, "%s: the kind is %s, the pointers are %s", who, kinds[kind], kinds[is]);
    check_copy(job);
    return push(stream, [job] { run_copy(job); });
}

cudaError_t push_memset(const char *who, void *dst, int value, size_t size, cudaStream_t stream)
{
    const task work = [=] {
        if (!is_allocated(dst, size))
            fail(nowhere, "%s of %zu bytes at %p is not within a device allocation", who, size,
                 dst);
        const device_range access(dst, size);
        memset(dst, value, size);
    };
    return size > 0 ? push(stream, work) : cudaSuccess;
}

// Nobody waits for what is only captured.
cudaError_t check_waiting(CUstream_st *s)
{
    if (!s->capture)
        return cudaSuccess;
    invalidate(s);
    return cudaErrorStreamCaptureUnsupported;
}

cudaError_t check_waiting(const event_state &state)
{
    return state.capture ? cudaErrorCapturedEvent : refuse_capture();
}

} // namespace

runtime_lock::runtime_lock()
{
    mutex.lock();
}

runtime_lock::~runtime_lock()
{
    mutex.unlock();
}

cudaError_t push(cudaStream_t stream, task work)
{
    CUstream_st *s = find_stream(stream);

    if (!s->capture)
        return append(s, step::work, std::move(work), nullptr, 0);
    if (!s->capture->valid)
        return cudaErrorStreamCaptureInvalidated;
    s->capture->nodes.push_back(std::move(work));
    return cudaSuccess;
}

void run_everything(const char *who)
{
    const auto is_idle = [] {
        return std::all_of(streams.begin(), streams.end(),
                           [](const CUstream_st *s) { return s->queue.empty(); });
    };
    run_until(is_idle, who);
}

cudaError_t wait_for_device(const char *who)
{
    stats.syncs++;
    run_everything(who);
    return device_error();
}

cudaError_t refuse_capture()
{
    cudaError_t error = cudaSuccess;

    for (CUstream_st *s : streams) {
        const stream_capture *capture = s->capture.get();
        if (!capture || capture->mode == cudaStreamCaptureModeRelaxed ||
            (capture->mode == cudaStreamCaptureModeThreadLocal &&
             capture->owner != std::this_thread::get_id()))
            continue;
        invalidate(s);
        error = cudaErrorStreamCaptureUnsupported;
    }
    return error;
}

void forget_streams()
{
    for (CUstream_st *s : streams) {
        s->queue.clear();
        s->capture.reset();
        s->destroyed = s != &legacy;
    }
    forget_destroyed();
}

size_t n_streams()
{
    return streams.size() - 1;
}

size_t n_events()
{
    return events.size();
}

size_t n_graphs()
{
    return n_live_graphs;
}

cudaError_t enqueue(const char *text, const void *kernel, const launch_shape &shape,
                    size_t n_parameter_bytes, std::vector<const volatile void *> pointers,
                    task body)
{
    return enter([&] {
        if (fails_now(EMU_FAIL_LAUNCH_IMAGE) || !has_kernel_image())
            return cudaErrorNoKernelImageForDevice;
        if (fails_now(EMU_FAIL_LAUNCH_CONFIG) || !is_launchable(shape.grid, shape.block))
            return cudaErrorInvalidConfiguration;
        if (shape.dynamic_shared > dynamic_limit(kernel))
            return cudaErrorInvalidValue;
        if (n_parameter_bytes > max_parameter_bytes)
            fail(nowhere, "the parameters of kernel %s take %zu bytes, more than %zu",
                 first_argument(text).c_str(), n_parameter_bytes, max_parameter_bytes);
        if (fails_now(EMU_FAIL_LAUNCH_ASYNC))
            return push(shape.stream, [] { break_device(cudaErrorLaunchFailure); });
        const kernel_launch k{first_argument(text), kernel, shape, std::move(pointers),
                              std::move(body)};
        return push(shape.stream, [k] { run_kernel(k); });
    });
}

} // namespace emu

using namespace emu;

cudaError_t cudaMemcpyAsync(void *dst, const void *src, size_t size, enum cudaMemcpyKind kind,
                            cudaStream_t stream)
{
    return enter(
        [&] { return push_copy("cudaMemcpyAsync", dst, size, src, size, size, 1, kind, stream); });
}

cudaError_t cudaMemcpy2DAsync(void *dst, size_t dst_pitch, const void *src, size_t src_pitch,
                              size_t width, size_t height, enum cudaMemcpyKind kind,
                              cudaStream_t stream)
{
    return enter([&] {
        return push_copy("cudaMemcpy2DAsync", dst, dst_pitch, src, src_pitch, width, height, kind,
                         stream);
    });
}

// Waits for the legacy stream and thereby for the blocking ones, not for the others.
cudaError_t cudaMemcpy(void *dst, const void *src, size_t size, enum cudaMemcpyKind kind)
{
    return enter([&] {
        cudaError_t error = refuse_capture();
        if (!error)
            error = push_copy("cudaMemcpy", dst, size, src, size, size, 1, kind, nullptr);
        return error ? error : wait_for_stream(&legacy, "cudaMemcpy");
    });
}

cudaError_t cudaMemsetAsync(void *dst, int value, size_t size, cudaStream_t stream)
{
    return enter([&] { return push_memset("cudaMemsetAsync", dst, value, size, stream); });
}

cudaError_t cudaMemset(void *dst, int value, size_t size)
{
    return enter([&] {
        const cudaError_t error = refuse_capture();
        return error ? error : push_memset("cudaMemset", dst, value, size, nullptr);
    });
}

cudaError_t cudaDeviceSynchronize(void)
{
    return enter([] {
        const cudaError_t error = refuse_capture();
        return error ? error : wait_for_device("cudaDeviceSynchronize");
    });
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned int flags)
{
    return enter([&] {
        *stream = new CUstream_st;
        (*stream)->blocking = !(flags & cudaStreamNonBlocking);
        streams.push_back(*stream);
        return cudaSuccess;
    });
}

cudaError_t cudaStreamCreate(cudaStream_t *stream)
{
    return cudaStreamCreateWithFlags(stream, cudaStreamDefault);
}

// Does not wait: what the stream holds is still done.
cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
    const runtime_lock lock;
    CUstream_st *s = find_stream(stream);

    if (s == &legacy)
        return report(cudaErrorInvalidResourceHandle);
    s->capture.reset();
    s->destroyed = true;
    forget_destroyed();
    return device_error();
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream)
{
    return enter([&] {
        CUstream_st *s = find_stream(stream);
        const cudaError_t error = check_waiting(s);
        return error ? error : wait_for_stream(s, "cudaStreamSynchronize");
    });
}

cudaError_t cudaStreamQuery(cudaStream_t stream)
{
    return enter([&] {
        CUstream_st *s = find_stream(stream);
        const cudaError_t error = check_waiting(s);
        return error ? error : ask([s] { return s->queue.empty(); });
    });
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int)
{
    return enter([&] {
        CUstream_st *s = find_stream(stream);
        const std::shared_ptr<event_state> &state = find_event(event)->state;
        const uint64_t capture = s->capture ? s->capture->id : 0;

        if (state->capture && state->capture != capture)
            fail(nowhere, "cudaStreamWaitEvent: captures of more than one stream are not emulated");
        if (state->capture || state->recorded == 0)
            return cudaSuccess; // the order of the capture, or nothing to wait for
        if (!capture)
            return append(s, step::wait, nullptr, state, state->recorded);
        invalidate(s);
        return cudaErrorStreamCaptureIsolation;
    });
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned int flags)
{
    return enter([&] {
        *event = new CUevent_st;
        (*event)->timed = !(flags & cudaEventDisableTiming);
        events.insert(*event);
        return cudaSuccess;
    });
}

cudaError_t cudaEventCreate(cudaEvent_t *event)
{
    return cudaEventCreateWithFlags(event, cudaEventDefault);
}

cudaError_t cudaEventDestroy(cudaEvent_t event)
{
    const runtime_lock lock;

    delete find_event(event);
    events.erase(event);
    return device_error();
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
    return enter([&] {
        CUstream_st *s = find_stream(stream);
        const std::shared_ptr<event_state> &state = find_event(event)->state;

        state->capture = s->capture ? s->capture->id : 0;
        return s->capture ? cudaSuccess
                          : append(s, step::record, nullptr, state, ++state->recorded);
    });
}

cudaError_t cudaEventSynchronize(cudaEvent_t event)
{
    return enter([&] {
        const std::shared_ptr<event_state> state = find_event(event)->state;
        const cudaError_t error = check_waiting(*state);
        return error ? error : wait([&] { return is_done(*state); }, "cudaEventSynchronize");
    });
}

cudaError_t cudaEventQuery(cudaEvent_t event)
{
    return enter([&] {
        const std::shared_ptr<event_state> state = find_event(event)->state;
        const cudaError_t error = check_waiting(*state);
        return error ? error : ask([&] { return is_done(*state); });
    });
}

// A millisecond for everything.
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t start, cudaEvent_t end)
{
    return enter([&] {
        const CUevent_st *first = find_event(start), *last = find_event(end);

        if (!first->timed || !last->timed || !first->state->recorded || !last->state->recorded)
            return cudaErrorInvalidResourceHandle;
        *ms = 1.0f;
        return is_done(*first->state) && is_done(*last->state) ? cudaSuccess : cudaErrorNotReady;
    });
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode)
{
    return enter([&] {
        CUstream_st *s = find_stream(stream);

        if (s == &legacy || s->capture)
            return cudaErrorStreamCaptureUnsupported;
        s->capture.reset(
            new stream_capture{++n_captures, mode, std::this_thread::get_id(), true, {}});
        return cudaSuccess;
    });
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph)
{
    return enter([&] {
        const std::unique_ptr<stream_capture> capture = std::move(find_stream(stream)->capture);

        *graph = nullptr;
        if (!capture)
            return cudaErrorStreamCaptureUnmatched;
        if (!capture->valid)
            return cudaErrorStreamCaptureInvalidated;
        *graph = new CUgraph_st{std::move(capture->nodes)};
        n_live_graphs++;
        return cudaSuccess;
    });
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status)
{
    return enter([&] {
        const CUstream_st *s = find_stream(stream);

        *status = !s->capture         ? cudaStreamCaptureStatusNone
                  : s->capture->valid ? cudaStreamCaptureStatusActive
                                      : cudaStreamCaptureStatusInvalidated;
        return cudaSuccess;
    });
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph, unsigned long long)
{
    return enter([&] {
        *exec = new CUgraphExec_st{graph->nodes};
        n_live_graphs++;
        return cudaSuccess;
    });
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream)
{
    return enter([&] {
        cudaError_t error = cudaSuccess;
        for (size_t i = 0; i < exec->nodes.size() && !error; i++)
            error = push(stream, exec->nodes[i]);
        return error;
    });
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph)
{
    const runtime_lock lock;

    delete graph;
    n_live_graphs--;
    return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec)
{
    const runtime_lock lock;

    delete exec;
    n_live_graphs--;
    return cudaSuccess;
}
