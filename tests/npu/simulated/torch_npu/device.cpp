// A simulated accelerator (PrivateUse1) for CPU builds of torch.
//
// Device memory is a memfd that is mapped twice. Tensors point into a mapping without access rights, so a read on the
// host causes a segmentation fault. Kernels use the second mapping of the same pages: the boxed fallback runs
// torch's CPU kernels on aliases of device memory, which supports in-place operators, views and lists of tensors.
//
// Kernels run when they are launched. On a real device, kernels on different streams may overlap unless one stream waits
// for the other. Therefore, a kernel raises an error if it uses memory that a kernel on another stream may still use.
// This includes memory that was freed without record_stream and allocated again.
//
// Copies between pinned and device memory with non_blocking=True run as late as their stream allows: before the next
// kernel on the same stream, or when an event or the host waits for them. Until then the destination contains NaN or
// -1. A host that does not wait, or a pinned buffer that is reused too early, therefore gives wrong numbers.
#include <torch/extension.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/InferSize.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <chrono>
#include <deque>
#include <functional>
#include <sys/mman.h>
#include <unistd.h>
#include <map>
#include <set>

namespace {
using namespace at;
constexpr auto NPU = c10::DeviceType::PrivateUse1;
constexpr int DEVICES = 2;
constexpr size_t ARENA = 6ull << 30;

// ---------------------------------------------------------------- reports to Python
py::object* watcher = nullptr;  // called with (kind, detail) while the GIL is held

void report(const char* kind, const std::string& detail) {
    if (watcher && Py_IsInitialized()) {
        py::gil_scoped_acquire gil;
        if (watcher) (*watcher)(kind, detail);
    }
}
pid_t owner = 0;

void check_process() {
    if (!owner) owner = getpid();
    TORCH_CHECK(owner == getpid(), "Cannot re-initialize NPU in forked subprocess (simulated)");
}

// ---------------------------------------------------------------- order of kernels
thread_local c10::DeviceIndex current = 0;
thread_local c10::StreamId streams[DEVICES] = {0, 0};
using Stream = std::pair<c10::DeviceIndex, c10::StreamId>;
using Clock = std::map<Stream, int64_t>;  // the number of a kernel for each stream

std::mutex ordering;
std::map<Stream, Clock> launched;  // the last kernel of a stream, and the kernels of other streams that end before it
Clock ended;                       // the kernels that the host has waited for
struct Uses {
    Clock written, read;        // the last write, and the reads after it
    std::set<Stream> recorded;  // record_stream was called for these streams
};
std::map<const void*, Uses> uses;  // by the address of the memory

Stream current_stream(c10::DeviceIndex device) { return {device, streams[device]}; }
void merge(Clock& into, const Clock& other) {
    for (auto& [stream, number] : other) into[stream] = std::max(into[stream], number);
}
void count_kernel(const Stream& stream) {
    std::lock_guard<std::mutex> lock(ordering);
    merge(launched[stream], ended);
    ++launched[stream][stream];
}
void host_waits(const Stream& stream) {
    std::lock_guard<std::mutex> lock(ordering);
    merge(ended, launched[stream]);
}
void check_order(const Clock& earlier, const Stream& stream, const std::string& name, const char* action) {
    for (auto& [other, number] : earlier)
        TORCH_CHECK(other == stream || launched[stream][other] >= number, "simulated NPU: ", name, " on stream ",
                    stream.second, " uses memory that stream ", other.second, " may still ", action,
                    ". Wait for an event of that stream, or call record_stream before the memory is freed");
}
void use(const void* memory, const Stream& stream, bool writes, const std::string& name) {
    std::lock_guard<std::mutex> lock(ordering);
    auto& found = uses[memory];
    check_order(found.written, stream, name, "write");
    if (writes) {
        check_order(found.read, stream, name, "read");
        found = {{{stream, launched[stream][stream]}}, {}, found.recorded};
    } else {
        found.read[stream] = launched[stream][stream];
    }
}
// Forget the uses on streams for which record_stream was called: a real allocator waits for them.
void forget_recorded(const void* memory) {
    std::lock_guard<std::mutex> lock(ordering);
    auto& found = uses[memory];
    for (auto& stream : found.recorded) {
        found.written.erase(stream);
        found.read.erase(stream);
    }
    found.recorded.clear();
}

// ---------------------------------------------------------------- memory
struct Block {
    size_t size;
    c10::StreamId stream;  // the stream that allocated the memory; only this stream reuses it
    bool operator<(const Block& other) const { return std::tie(size, stream) < std::tie(other.size, other.stream); }
};
struct Arena {
    char *visible = nullptr, *real = nullptr;
    size_t top = 512;
    std::map<Block, std::vector<size_t>> unused;
    std::map<size_t, Block> blocks;
    c10::CachingDeviceAllocator::DeviceStats stats;
    std::mutex mutex;
    void open() {
        if (real) return;
        int fd = memfd_create("simulated_npu", 0);
        TORCH_CHECK(fd >= 0 && !ftruncate(fd, ARENA), "simulated NPU: memfd");
        real = (char*)mmap(nullptr, ARENA, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
        visible = (char*)mmap(nullptr, ARENA, PROT_NONE, MAP_SHARED | MAP_NORESERVE, fd, 0);
        TORCH_CHECK(real != MAP_FAILED && visible != MAP_FAILED, "simulated NPU: mmap");
        close(fd);
    }
} arenas[DEVICES];
char* kernel_address(const void* p) {
    if (!p) return nullptr;
    for (auto& a : arenas)
        if (a.visible && (char*)p >= a.visible && (char*)p < a.visible + ARENA) return a.real + ((char*)p - a.visible);
    TORCH_CHECK(false, "simulated NPU: not device memory");
}
void release(void* p) {
    if (!p || owner != getpid()) return;
    for (auto& a : arenas)
        if (a.visible && (char*)p >= a.visible && (char*)p < a.visible + ARENA) {
            std::lock_guard<std::mutex> lock(a.mutex);
            size_t at = (char*)p - a.visible, n = a.blocks.at(at).size;
            memset(a.real + at, 0xFF, std::min(n, (size_t)4096));  // poison: NaN, -1
            forget_recorded(p);
            a.unused[a.blocks.at(at)].push_back(at);
            a.stats.allocated_bytes[0].decrease(n);
            a.stats.active_bytes[0].decrease(n);
        }
}
struct Memory final : c10::DeviceAllocator {
    DataPtr allocate(size_t n) override {
        check_process();
        auto& a = arenas[current];
        std::lock_guard<std::mutex> lock(a.mutex);
        a.open();
        Device device(NPU, current);
        if (!n) return {nullptr, nullptr, &release, device};
        n = (n + 511) / 512 * 512;
        if (n > (1 << 20)) n = (n + (1 << 20) - 1) >> 20 << 20;
        size_t at;
        const Block block{n, streams[current]};
        auto& unused = a.unused[block];
        if (unused.size()) {
            at = unused.back();
            unused.pop_back();
        } else {
            at = a.top;
            a.top += n;
            TORCH_CHECK_WITH(OutOfMemoryError, a.top <= ARENA, "simulated NPU out of memory");
            a.stats.reserved_bytes[0].increase(n);
        }
        a.blocks.insert_or_assign(at, block);
        a.stats.allocated_bytes[0].increase(n);
        a.stats.active_bytes[0].increase(n);
        return {a.visible + at, a.visible + at, &release, device};
    }
    DeleterFnPtr raw_deleter() const override { return &release; }
    void copy_data(void* to, const void* from, size_t n) const override { memcpy(kernel_address(to), kernel_address(from), n); }
    bool initialized() override { return true; }
    void emptyCache(c10::MempoolId_t) override {}
    void recordStream(const DataPtr& memory, c10::Stream stream) override {
        std::lock_guard<std::mutex> lock(ordering);
        uses[memory.get()].recorded.insert({stream.device_index(), stream.id()});
    }
    c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex i) override { return arenas[i].stats; }
    void resetAccumulatedStats(c10::DeviceIndex) override {}
    void resetPeakStats(c10::DeviceIndex i) override {
        arenas[i].stats.allocated_bytes[0].reset_peak();
        arenas[i].stats.reserved_bytes[0].reset_peak();
    }
    std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex i) override { return {ARENA - arenas[i].top, ARENA}; }
} memory;
REGISTER_ALLOCATOR(NPU, &memory)

std::mutex pinning;
std::map<char*, size_t> pinned;
bool is_pinned(const void* p) {
    std::lock_guard<std::mutex> lock(pinning);
    auto it = pinned.upper_bound((char*)p);
    if (it == pinned.begin()) return false;
    --it;
    return (char*)p < it->first + std::max(it->second, (size_t)1);
}
struct PinnedMemory final : c10::Allocator {
    static void drop(void* p) {
        {
            std::lock_guard<std::mutex> lock(pinning);
            pinned.erase((char*)p);
        }
        free(p);
    }
    DataPtr allocate(size_t n) override {
        check_process();
        void* p = nullptr;
        TORCH_CHECK(!posix_memalign(&p, 64, std::max(n, (size_t)64)));
        std::lock_guard<std::mutex> lock(pinning);
        pinned[(char*)p] = n;
        return {p, p, &drop, Device(kCPU)};
    }
    DeleterFnPtr raw_deleter() const override { return &drop; }
    void copy_data(void* to, const void* from, size_t n) const override { memcpy(to, from, n); }
} pinned_memory;

// ---------------------------------------------------------------- device guard, streams, events
std::atomic<int64_t> next_stream{1};
c10::DeviceIndex number(Device d) {
    return d.has_index() ? d.index() : current;
}

// Pending copies, by device and stream. Copies are numbered so that an event can wait for some of them.
struct Copy {
    int64_t number;
    std::function<void()> run;
};
std::recursive_mutex queueing;
std::map<Stream, std::deque<Copy>> queues;
int64_t last_copy = 0;

// Run the copies of a stream, up to a number.
void run_copies(const Stream& stream, int64_t until = std::numeric_limits<int64_t>::max()) {
    std::lock_guard<std::recursive_mutex> lock(queueing);
    auto& queue = queues[stream];
    while (!queue.empty() && queue.front().number <= until) {
        auto copy = std::move(queue.front());
        queue.pop_front();
        copy.run();
    }
}
// Run the copies of a stream. The host waits for them.
void synchronize(const Stream& stream) {
    run_copies(stream);
    host_waits(stream);
}
struct Event {
    Stream stream;
    int64_t until;
    Clock kernels;
    std::chrono::steady_clock::time_point time;
};
// A kernel on the current stream of a device.
struct Kernel {
    Stream stream;
    std::string name;
    Kernel(c10::DeviceIndex device, std::string name) : stream(current_stream(device)), name(std::move(name)) {
        count_kernel(stream);
    }
    void uses(const Tensor& t, bool writes) const {
        if (t.defined() && t.device().type() == NPU && t.numel()) use(t.storage().data(), stream, writes, name);
    }
    void uses(const IValue& v, bool writes) const {
        if (v.isTensor()) {
            uses(v.toTensor(), writes);
        } else if (v.isTensorList()) {
            for (const Tensor& t : v.toTensorVector()) uses(t, writes);
        } else if (v.isOptionalTensorList()) {
            for (const auto& t : v.toOptionalTensorVector())
                if (t) uses(*t, writes);
        }
    }
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
    c10::DeviceType type() const override { return NPU; }
    Device exchangeDevice(Device d) const override {
        Device old(NPU, current);
        setDevice(d);
        return old;
    }
    Device getDevice() const override { return {NPU, current}; }
    void setDevice(Device d) const override {
        TORCH_CHECK(number(d) < DEVICES, "invalid device ordinal ", d);
        current = number(d);
    }
    void uncheckedSetDevice(Device d) const noexcept override { current = number(d); }
    c10::Stream at_(Device d, c10::StreamId id) const {
        return c10::Stream(c10::Stream::UNSAFE, Device(NPU, number(d)), id);
    }
    c10::Stream getStream(Device d) const override { return at_(d, streams[number(d)]); }
    c10::Stream getDefaultStream(Device d) const override { return at_(d, 0); }
    c10::Stream getStreamFromGlobalPool(Device d, bool) const override { return at_(d, next_stream++); }
    c10::Stream getNewStream(Device d, int) const override { return at_(d, next_stream++); }
    c10::Stream exchangeStream(c10::Stream s) const override {
        auto old = getStream(s.device());
        streams[s.device_index()] = s.id();
        return old;
    }
    void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
        std::lock_guard<std::recursive_mutex> lock(queueing);
        if (!*event) *event = new Event;
        std::lock_guard<std::mutex> order(ordering);
        const auto found = key(stream);
        *static_cast<Event*>(*event) = {found, last_copy, launched[found], std::chrono::steady_clock::now()};
    }
    void block(void* event, const c10::Stream& stream) const override {
        wait(event, key(stream));
    }
    bool queryEvent(void* event) const override {
        wait(event);
        return true;
    }
    void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
    c10::DeviceIndex deviceCount() const noexcept override { return DEVICES; }
    bool queryStream(const c10::Stream& stream) const override {
        synchronize(key(stream));
        return true;
    }
    void synchronizeStream(const c10::Stream& stream) const override {
        report("synchronize", "stream");
        synchronize(key(stream));
    }
    void synchronizeEvent(void* event) const override {
        report("synchronize", "event");
        wait(event);
    }
    void synchronizeDevice(const c10::DeviceIndex device) const override {
        report("synchronize", "device");
        std::lock_guard<std::recursive_mutex> lock(queueing);
        for (auto& [stream, queue] : queues)
            if (stream.first == device) run_copies(stream);
        std::lock_guard<std::mutex> order(ordering);
        for (auto& [stream, kernels] : launched)
            if (stream.first == device) merge(ended, kernels);
    }
    static Stream key(const c10::Stream& stream) { return {number(stream.device()), stream.id()}; }
    static void wait(void* recorded, std::optional<Stream> waiting = std::nullopt) {  // without a stream, the host waits
        if (!recorded) return;
        const auto& event = *static_cast<Event*>(recorded);
        run_copies(event.stream, event.until);
        std::lock_guard<std::mutex> order(ordering);
        merge(waiting ? launched[*waiting] : ended, event.kernels);
    }
    double elapsedTime(void* start, void* end, const c10::DeviceIndex) const override {  // in milliseconds
        return std::chrono::duration<double, std::milli>(static_cast<Event*>(end)->time -
                                                         static_cast<Event*>(start)->time)
            .count();
    }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// ---------------------------------------------------------------- random numbers
struct NpuGenerator final : c10::GeneratorImpl {
    at::Generator inner = at::detail::createCPUGenerator();
    explicit NpuGenerator(c10::DeviceIndex i)
        : GeneratorImpl(Device(NPU, i), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
    void set_current_seed(uint64_t s) override { inner.set_current_seed(s); }
    void set_offset(uint64_t) override {}
    uint64_t get_offset() const override { return 0; }
    uint64_t current_seed() const override { return inner.current_seed(); }
    uint64_t seed() override { return inner.seed(); }
    void set_state(const c10::TensorImpl& s) override {
        auto t = at::Tensor(s.shallow_copy_and_detach(s.version_counter(), true));
        inner.set_state(t);
    }
    c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return inner.get_state().getIntrusivePtr(); }
    c10::GeneratorImpl* clone_impl() const override {
        auto* copy = new NpuGenerator(device().index());
        copy->inner.set_state(inner.get_state());
        return copy;
    }
};
at::Generator& default_generator(c10::DeviceIndex i) {
    static std::vector<at::Generator> all = [] {
        std::vector<at::Generator> v;
        for (int i = 0; i < DEVICES; ++i) {
            v.push_back(at::make_generator<NpuGenerator>(i));
            v.back().set_current_seed(c10::default_rng_seed_val);
        }
        return v;
    }();
    return all[i < 0 ? current : i];
}
struct Hooks final : at::PrivateUse1HooksInterface {
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return true; }
    bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
    c10::DeviceIndex deviceCount() const override { return DEVICES; }
    void setCurrentDevice(c10::DeviceIndex i) const override { Guard().setDevice({NPU, i}); }
    c10::DeviceIndex getCurrentDevice() const override { return current; }
    c10::DeviceIndex exchangeDevice(c10::DeviceIndex i) const override {
        auto old = current;
        current = i;
        return old;
    }
    c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex i) const override { return exchangeDevice(i); }
    const Generator& getDefaultGenerator(c10::DeviceIndex i) const override { return default_generator(i); }
    Generator getNewGenerator(c10::DeviceIndex i) const override {
        return at::make_generator<NpuGenerator>(i < 0 ? current : i);
    }
    Device getDeviceFromPtr(void* p) const override {
        for (int i = 0; i < DEVICES; ++i)
            if ((char*)p >= arenas[i].visible && (char*)p < arenas[i].visible + ARENA) return {NPU, (c10::DeviceIndex)i};
        TORCH_CHECK(false, "not device memory");
    }
    bool isPinnedPtr(const void* p) const override { return is_pinned(p); }
    Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
    void resizePrivateUse1Bytes(const c10::Storage& s, size_t n) const override {
        c10::DeviceGuard guard(s.device());
        auto to = memory.allocate(n);
        if (auto keep = std::min(n, s.nbytes())) memcpy(kernel_address(to.get()), kernel_address(s.data()), keep);
        s.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(to));
        s.unsafeGetStorageImpl()->set_nbytes(n);
    }
} hooks;

// ---------------------------------------------------------------- tensors that kernels can read
Tensor readable(const Tensor& t) {
    if (!t.defined() || t.device().type() != NPU) return t;
    auto storage = t.storage();
    c10::Storage host(
        c10::Storage::use_byte_size_t(), storage.nbytes(),
        DataPtr(
            kernel_address(storage.data()), new c10::Storage(storage), [](void* s) { delete (c10::Storage*)s; }, kCPU),
        c10::GetAllocator(kCPU), true);
    auto out = at::detail::make_tensor<c10::TensorImpl>(std::move(host), c10::DispatchKeySet(c10::DispatchKey::CPU),
                                                        t.dtype());
    out.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
    if (t.unsafeGetTensorImpl()->is_wrapped_number()) out.unsafeGetTensorImpl()->set_wrapped_number(true);
    return out;
}
Tensor empty_strided_(IntArrayRef size, IntArrayRef stride, std::optional<ScalarType> dtype, std::optional<Layout>,
                      std::optional<Device> device, std::optional<bool> pin) {
    c10::DeviceGuard guard(device.value_or(Device(NPU, current)));
    return at::detail::empty_strided_generic(size, stride, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                             dtype.value_or(at::get_default_dtype_as_scalartype()));
}
Tensor to_device(const Tensor& host, Device device) {  // the result of a kernel, which is not counted as a copy
    if (!host.defined() || host.device().type() != kCPU) return host;
    auto out = empty_strided_(host.sizes(), host.strides(), host.scalar_type(), {}, device, {});
    readable(out).copy_(host);
    if (out.numel()) use(out.storage().data(), current_stream(out.device().index()), true, "a new tensor");
    return out;
}
const std::set<std::string> SYNCS{"aten::nonzero",
                                  "aten::nonzero.out",
                                  "aten::masked_select",
                                  "aten::masked_select.out",
                                  "aten::equal",
                                  "aten::_unique2",
                                  "aten::unique_dim",
                                  "aten::unique_consecutive",
                                  "aten::repeat_interleave.Tensor",
                                  "aten::bincount",
                                  "aten::is_nonzero",
                                  "aten::_unique",
                                  "aten::multinomial"};
const std::set<std::string> INDICES_MAY_BE_CPU{"aten::index.Tensor", "aten::index.Tensor_out", "aten::index_put_",
                                               "aten::_index_put_impl_", "aten::index_put"};

bool is_index_with_a_mask(const std::string& name, const std::vector<IValue>& arguments) {
    if (name.rfind("aten::index", 0) != 0 || arguments.size() < 2 || !arguments[1].isOptionalTensorList()) return false;
    for (auto t : arguments[1].toOptionalTensorVector())
        if (t && t->defined() && (t->scalar_type() == kBool || t->scalar_type() == kByte)) return true;
    return false;
}
void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
    check_process();
    const auto& schema = op.schema();
    const auto name = c10::toString(op.operator_name());
    const size_t n = schema.arguments().size(), begin = stack->size() - n;
    std::vector<IValue> arguments(stack->begin() + begin, stack->end());
    std::optional<Device> device;
    Tensor from_host;
    std::vector<std::pair<size_t, Tensor>> written;
    bool takes_generator = false;
    auto swap = [&](const Tensor& t) {
        if (!t.defined()) return t;
        if (t.device().type() == NPU) {
            TORCH_CHECK(!device || *device == t.device(), "simulated NPU: ", name, ": tensors on ", *device,
                        " and ", t.device());
            device = t.device();
        } else if (t.dim() > 0)
            from_host = t;
        return readable(t);
    };
    for (size_t i = 0; i < n; ++i)
        if (arguments[i].isDevice())
            device = arguments[i].toDevice().type() == NPU ? std::optional(Device(NPU, number(arguments[i].toDevice())))
                                                       : std::nullopt;
    for (size_t i = 0; i < n; ++i) {
        auto& v = (*stack)[begin + i];
        const auto& arg = schema.arguments()[i];
        if (v.isTensor()) {
            v = swap(v.toTensor());
            if (arg.alias_info() && arg.alias_info()->isWrite()) written.emplace_back(i, v.toTensor());
        } else if (v.isTensorList()) {
            c10::List<Tensor> l;
            for (const Tensor& t : v.toTensorVector()) l.push_back(swap(t));
            v = l;
        } else if (v.isOptionalTensorList()) {
            c10::List<std::optional<Tensor>> l;
            for (auto t : v.toOptionalTensorVector()) {
                if (t)
                    l.push_back(swap(*t));
                else
                    l.push_back(std::nullopt);
            }
            v = l;
        } else if (v.isDevice())
            v = Device(kCPU);
        else if (v.isGenerator()) {
            takes_generator = true;
            auto g = v.toGenerator();
            if (g.device().type() == NPU)
                v = g.get<NpuGenerator>()->inner;
            else
                TORCH_CHECK(false, "simulated NPU: ", name, ": expected a 'npu' generator, got a 'cpu' one");
        } else if (v.isNone() && arg.type()->str() == "Generator?") {
            takes_generator = true;
            v = default_generator(device ? device->index() : -1).get<NpuGenerator>()->inner;
        }
    }
    Device where = device.value_or(Device(NPU, current));
    TORCH_CHECK(!from_host.defined() || !device || INDICES_MAY_BE_CPU.count(name),
                "Expected all tensors to be on the same device, but found at least two devices, ", where,
                " and cpu! (simulated NPU: ", name, ", CPU tensor of size ", from_host.sizes(), ")");
    const bool masked = is_index_with_a_mask(name, arguments);
    if (masked || SYNCS.count(name)) report("hidden_sync", masked ? name + " with a mask" : name);
    report("kernel", name);
    const Kernel kernel(where.index(), name);
    for (size_t i = 0; i < n; ++i) {
        const auto* info = schema.arguments()[i].alias_info();
        kernel.uses(arguments[i], info && info->isWrite());
    }
    run_copies(kernel.stream);
    if (masked || SYNCS.count(name)) host_waits(kernel.stream);
    at::AutoDispatchBelowADInplaceOrView below;
    c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const bool hidden_generator = !takes_generator && op.hasTag(at::Tag::nondeterministic_seeded);  // e.g. native_dropout
    auto global = at::detail::getDefaultCPUGenerator();
    Tensor saved;
    if (hidden_generator) {
        saved = global.get_state();
        global.set_state(default_generator(where.index()).get<NpuGenerator>()->inner.get_state());
    }
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
    if (hidden_generator) {
        default_generator(where.index()).get<NpuGenerator>()->inner.set_state(global.get_state());
        global.set_state(saved);
    }
    for (auto& [i, host] : written) {  // an out= tensor that the kernel resized
        auto own = arguments[i].toTensor();
        if (own.device().type() != NPU || (host.sizes() == own.sizes() && host.strides() == own.strides() &&
                                           host.const_data_ptr() == kernel_address(own.const_data_ptr())))
            continue;
        auto fresh = to_device(host, own.device());
        own.unsafeGetTensorImpl()->set_storage_keep_dtype(fresh.storage());
        own.unsafeGetTensorImpl()->set_sizes_and_strides(fresh.sizes(), fresh.strides(), 0);
    }
    for (size_t k = 0; k < schema.returns().size(); ++k) {
        auto& v = (*stack)[stack->size() - schema.returns().size() + k];
        const auto* info = schema.returns()[k].alias_info();
        if (info) {
            TORCH_CHECK(info->isWrite(), "simulated NPU: the view op ", name, " has no custom kernel");
            for (size_t i = 0; i < n; ++i)
                if (schema.arguments()[i].alias_info() && *schema.arguments()[i].alias_info() == *info) v = arguments[i];
        } else if (v.isTensor())
            v = to_device(v.toTensor(), where);
        else if (v.isTensorList()) {
            c10::List<Tensor> l;
            for (const Tensor& t : v.toTensorVector()) l.push_back(to_device(t, where));
            v = l;
        }
    }
}

// ---------------------------------------------------------------- custom kernels: memory, views, copies
Tensor empty_(IntArrayRef size, std::optional<ScalarType> dtype, std::optional<Layout>, std::optional<Device> device,
              std::optional<bool>, std::optional<MemoryFormat> format) {
    c10::DeviceGuard guard(device.value_or(Device(NPU, current)));
    return at::detail::empty_generic(size, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                     dtype.value_or(at::get_default_dtype_as_scalartype()), format);
}
void fit(const Tensor& t, size_t bytes) {
    if (bytes > t.storage().nbytes()) hooks.resizePrivateUse1Bytes(t.storage(), bytes);
}
const Tensor& resize_(const Tensor& self, IntArrayRef size, std::optional<MemoryFormat> format) {
    auto* impl = self.unsafeGetTensorImpl();
    impl->set_sizes_contiguous(size);
    if (format && *format != MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
    fit(self, at::detail::computeStorageNbytes(impl->sizes(), impl->strides(), self.itemsize(), self.storage_offset()));
    return self;
}
Tensor& set_storage(Tensor& self, c10::Storage source, int64_t offset, IntArrayRef size, IntArrayRef stride) {
    auto* impl = self.unsafeGetTensorImpl();
    impl->set_storage_keep_dtype(std::move(source));
    if (stride.data() && stride.size() == size.size())
        impl->set_sizes_and_strides(size, stride, offset);
    else {
        impl->set_sizes_contiguous(size);
        impl->set_storage_offset(offset);
    }
    fit(self, at::detail::computeStorageNbytes(impl->sizes(), impl->strides(), self.itemsize(), offset));
    return self;
}
Tensor& set_whole(Tensor& self, c10::Storage source) {
    int64_t n = source.nbytes() / self.itemsize();
    return set_storage(self, std::move(source), 0, {n}, {1});
}
Tensor& set_tensor(Tensor& self, const Tensor& source) {
    return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}
Tensor& set_nothing(Tensor& self) {
    return set_tensor(self, empty_({0}, self.scalar_type(), {}, self.device(), {}, {}));
}
// Fill the destination of a pending copy with NaN or -1, which a premature read returns.
void poison(const Tensor& tensor) {
    if (tensor.is_floating_point() || tensor.is_complex()) {
        tensor.fill_(std::numeric_limits<double>::quiet_NaN());
    } else {
        tensor.fill_(-1);
    }
}
void wait_for_each_other(const Stream& some, const Stream& other) {
    run_copies(some);
    run_copies(other);
    std::lock_guard<std::mutex> lock(ordering);
    merge(launched[some], launched[other]);
    merge(launched[other], launched[some]);
}
Tensor copy_from(const Tensor& self, const Tensor& dst, bool non_blocking) {
    check_process();
    const bool from = self.device().type() == NPU, to = dst.device().type() == NPU;
    const bool pinned = is_pinned(from ? dst.const_data_ptr() : self.const_data_ptr());
    const bool async = from != to && non_blocking && pinned && self.numel();
    const auto text = c10::str(self.scalar_type(), " ", self.sizes(), non_blocking ? " non_blocking" : " blocking",
                               pinned ? " pinned" : " pageable");
    if (from && !to) {
        report(async ? "device_to_host_async" : "device_to_host", text);
    } else if (to && !from && self.numel()) {
        report(async ? "host_to_device_async" : "host_to_device_blocking", text);
    }
    at::AutoDispatchBelowADInplaceOrView below;
    const auto device = number((to ? dst : self).device());
    const auto source_stream = current_stream(number((from ? self : dst).device()));
    if (from && to) wait_for_each_other(source_stream, current_stream(device));
    const Kernel kernel(device, "a copy");
    kernel.uses(self, false);
    kernel.uses(dst, true);
    auto source = readable(self), target = readable(dst);
    if (async) {
        poison(target);
        std::lock_guard<std::recursive_mutex> lock(queueing);
        auto run = [source, target] {
            at::AutoDispatchBelowADInplaceOrView below;
            target.copy_(source);
        };
        queues[kernel.stream].push_back({++last_copy, run});
        return dst;
    }
    run_copies(kernel.stream);
    if (from != to) {
        host_waits(kernel.stream);
    } else {
        wait_for_each_other(source_stream, kernel.stream);
    }
    target.copy_(source);
    return dst;
}
Tensor copy_and_resize(const Tensor& self, const Tensor& dst) {
    dst.resize_(self.sizes());
    return copy_from(self, dst, false);
}
Scalar local_scalar(const Tensor& self) {
    report("item", c10::str(self.scalar_type()));
    const Kernel kernel(number(self.device()), "item");
    kernel.uses(self, false);
    synchronize(kernel.stream);
    return readable(self).item();
}
void launch(const char* name, std::initializer_list<Tensor> read) {
    const Kernel kernel(number(read.begin()->device()), name);
    for (const Tensor& t : read) kernel.uses(t, false);
    run_copies(kernel.stream);
}
Tensor conv(const Tensor& x, const Tensor& w, const std::optional<Tensor>& b, IntArrayRef stride, IntArrayRef padding,
            IntArrayRef dilation, bool transposed, IntArrayRef outpad, int64_t groups) {
    TORCH_CHECK(x.device() == w.device() && (!b || !b->defined() || b->device() == x.device()),
                "Expected all tensors to be on the same device (simulated NPU: convolution)");
    at::AutoDispatchBelowADInplaceOrView below;
    launch("convolution", {x, w, b.value_or(Tensor())});
    auto bias = b ? std::optional(readable(*b)) : std::nullopt;
    auto out = at::convolution(readable(x), readable(w), bias, stride, padding, dilation, transposed, outpad, groups);
    return to_device(out.contiguous(), x.device());  // the output strides that torch assumes for this operator
}
std::tuple<Tensor, Tensor, Tensor> conv_backward(const Tensor& g, const Tensor& x, const Tensor& w, IntArrayRef stride,
                                                 IntArrayRef padding, IntArrayRef dilation, bool transposed,
                                                 IntArrayRef outpad, int64_t groups, std::array<bool, 3> mask) {
    at::AutoDispatchBelowADInplaceOrView below;
    launch("convolution_backward", {g, x, w});
    auto bias = IntArrayRef(transposed ? w.size(1) * groups : w.size(0));
    auto [a, b, c] = at::convolution_backward(readable(g), readable(x), readable(w), bias, stride, padding, dilation,
                                              transposed, outpad, groups, mask);
    auto strides = [](const Tensor& t) { return t.defined() ? t.contiguous() : t; };
    return {to_device(strides(a), x.device()), to_device(strides(b), x.device()), to_device(c, x.device())};
}
void record_stream(Tensor& t, c10::Stream stream) { memory.recordStream(t.storage().data_ptr(), stream); }
Tensor view_as_real(const Tensor& s) {
    auto size = s.sizes().vec(), stride = s.strides().vec();
    for (auto& v : stride) v *= 2;
    size.push_back(2);
    stride.push_back(1);
    auto out = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(s.storage()), s.key_set(), c10::scalarTypeToTypeMeta(c10::toRealValueType(s.scalar_type())));
    out.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, s.storage_offset() * 2);
    return out;
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
    m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
    m.impl("empty.memory_format", empty_);
    m.impl("empty_strided", empty_strided_);
    m.impl("resize_", resize_);
    m.impl("as_strided", at::native::as_strided_tensorimpl);
    m.impl("view", at::native::view);
    m.impl("unfold", at::native::unfold);
    m.impl("_reshape_alias", at::native::_reshape_alias);
    m.impl("view_as_real", view_as_real);
    m.impl("set_.source_Storage_storage_offset", set_storage);
    m.impl("set_.source_Storage", set_whole);
    m.impl("set_.source_Tensor", set_tensor);
    m.impl("set_", set_nothing);
    m.impl("_copy_from", copy_from);
    m.impl("_copy_from_and_resize", copy_and_resize);
    m.impl("_local_scalar_dense", local_scalar);
    m.impl("convolution_overrideable", conv);
    m.impl("convolution_backward_overrideable", conv_backward);
    m.impl("record_stream", record_stream);
}
// Registered by name, so that `torch._C._dispatch_has_kernel_for_dispatch_key` finds them like a vendor's kernels.
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
    for (const char* op : {"_fused_adam_", "_fused_adam_.tensor_lr", "_fused_adamw_", "_fused_adamw_.tensor_lr",
                           "_fused_sgd_", "_fused_sgd_.tensor_lr", "_fused_adagrad_"})
        m.impl(op, torch::CppFunction::makeFromBoxedFunction<&fallback>());
}
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
    m.fallback(torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define LOW(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FULL(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define FULL_OUT(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define WIDEST(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
    AT_FORALL_LOWER_PRECISION_FP(LOW)
    AT_FORALL_FP32(FULL) AT_FORALL_FP32_SET_OPT_DTYPE(FULL_OUT)
        AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
            AT_FORALL_PROMOTE(WIDEST) m.impl("cat", [](const c10::IListRef<Tensor>& l, int64_t dim) {
                c10::impl::ExcludeDispatchKeyGuard no(c10::DispatchKey::AutocastPrivateUse1);
                auto t = at::autocast::promote_type(at::autocast::get_lower_precision_fp_from_device_type(NPU), NPU, l);
                return at::cat(at::autocast::cached_cast(t, l, NPU), dim);
            });
}

// ---------------------------------------------------------------- a mock of hccl: gloo on aliases of device
// memory
using namespace c10d;
using W = c10::intrusive_ptr<Work>;
Tensor aliases(const Tensor& t) {
    TORCH_CHECK(t.device().type() == NPU, "hccl: a CPU tensor");
    const Kernel kernel(number(t.device()), "a collective");
    kernel.uses(t, true);
    run_copies(kernel.stream);
    return readable(t);
}
template <typename T>
std::vector<T> aliases(const std::vector<T>& l) {
    std::vector<T> o;
    for (auto& t : l) o.push_back(aliases(t));
    return o;
}
struct Hccl final : c10d::Backend {
    c10::intrusive_ptr<c10d::Backend> g;
    Hccl(c10::intrusive_ptr<c10d::Backend> gloo) : c10d::Backend(gloo->getRank(), gloo->getSize()), g(gloo) {}
    const std::string getBackendName() const override { return "hccl"; }
    template <typename Collective, typename Options, typename... T>
    W call(Collective collective, const Options& options, const T&... tensors) {
        auto host = std::make_tuple(aliases(tensors)...);
        return std::apply([&](auto&... t) { return ((*g).*collective)(t..., options); }, host);
    }
    using Tensors = std::vector<Tensor>;
    W broadcast(Tensors& t, const BroadcastOptions& o) override { return call(&Backend::broadcast, o, t); }
    W allreduce(Tensors& t, const AllreduceOptions& o) override { return call(&Backend::allreduce, o, t); }
    W allreduce_coalesced(Tensors& t, const AllreduceCoalescedOptions& o) override {
        return call(&Backend::allreduce_coalesced, o, t);
    }
    W reduce(Tensors& t, const ReduceOptions& o) override { return call(&Backend::reduce, o, t); }
    W allgather(std::vector<Tensors>& t, Tensors& i, const AllgatherOptions& o) override {
        return call(&Backend::allgather, o, t, i);
    }
    W _allgather_base(Tensor& t, Tensor& i, const AllgatherOptions& o) override {
        return call(&Backend::_allgather_base, o, t, i);
    }
    W allgather_into_tensor_coalesced(Tensors& t, Tensors& i, const AllgatherOptions& o) override {
        return call(&Backend::allgather_into_tensor_coalesced, o, t, i);
    }
    W _reduce_scatter_base(Tensor& t, Tensor& i, const ReduceScatterOptions& o) override {
        return call(&Backend::_reduce_scatter_base, o, t, i);
    }
    W reduce_scatter_tensor_coalesced(Tensors& t, Tensors& i, const ReduceScatterOptions& o) override {
        return call(&Backend::reduce_scatter_tensor_coalesced, o, t, i);
    }
    W barrier(const BarrierOptions& o) override { return g->barrier(o); }
    void setSequenceNumberForGroup() override {}
    uint64_t getSequenceNumberForGroup() override { return 0; }
};
}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
    at::RegisterPrivateUse1HooksInterface(&hooks);
    m.def("watch", [](py::object f) { watcher = f.is_none() ? nullptr : new py::object(f); });
    m.def("default_generator", [](int i) { return default_generator(i); });
    m.def("bad_fork", [] { return owner && owner != getpid(); });
    m.def("hccl", [](c10::intrusive_ptr<c10d::Backend> gloo) -> c10::intrusive_ptr<c10d::Backend> {
        return c10::make_intrusive<Hccl>(gloo);
    });
}
