// A virtual GPU: what a CUDA build of PyTorch calls of the CUDA runtime, answered from host memory.
//
// Device memory is address space of this process, touched only when something writes to it; copies and memsets are
// done at once; kernels are counted and do nothing. See README.md for the variables that choose the card.
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <cxxabi.h>
#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#define API extern "C" __attribute__((visibility("default")))
using std::string;
typedef unsigned long long u64;
static const u64 MiB = 1ull << 20;

// ---------------------------------------------------------------------------------------------------------------- cards

struct Card {
  const char *key, *name;
  int major, minor, sms, threads_per_sm, shared_optin_kib, l2_mib;
  u64 memory_mib;  // what cudaMemGetInfo calls total: a little less than the card's nominal memory
};
static const Card CARDS[] = {
    {"t4", "Tesla T4", 7, 5, 40, 1024, 64, 4, 14913},
    {"rtx3060", "NVIDIA GeForce RTX 3060", 8, 6, 28, 1536, 99, 2, 11911},
    {"a10g", "NVIDIA A10G", 8, 6, 80, 1536, 99, 6, 22502},
    {"rtx4090", "NVIDIA GeForce RTX 4090", 8, 9, 128, 1536, 99, 72, 24080},
    {"l4", "NVIDIA L4", 8, 9, 58, 1536, 99, 48, 22478},
    {"a100", "NVIDIA A100-SXM4-80GB", 8, 0, 108, 2048, 163, 40, 81152},
    {"h100", "NVIDIA H100 80GB HBM3", 9, 0, 132, 2048, 227, 50, 81080},
};

static u64 bytes_of(const char *text, u64 otherwise) {  // "12GiB", "800MiB" or a plain number of bytes
  if (!text || !*text) return otherwise;
  char *end;
  double n = strtod(text, &end);
  u64 unit = *end == 'G' || *end == 'g' ? 1024 * MiB : *end == 'M' || *end == 'm' ? MiB : *end == 'K' || *end == 'k' ? 1024 : 1;
  return (u64)(n * unit);
}

struct Config {
  Card card = CARDS[1];
  u64 memory, context, copy_limit;
  int devices;
  bool late;
  Config() {
    const char *key = getenv("VGPU");
    bool known = !key;
    for (const Card &c : CARDS)
      if (key && !strcasecmp(key, c.key)) card = c, known = true;
    if (!known) fprintf(stderr, "VGPU=%s is not a virtual GPU; it is an RTX 3060\n", key);
    memory = bytes_of(getenv("VGPU_MEMORY"), card.memory_mib * MiB);
    context = bytes_of(getenv("VGPU_CONTEXT"), 500 * MiB);        // what the driver keeps for a process
    copy_limit = bytes_of(getenv("VGPU_COPY_LIMIT"), ~0ull);       // larger copies are counted, not done
    devices = getenv("VGPU_DEVICES") ? atoi(getenv("VGPU_DEVICES")) : 1;
    late = getenv("VGPU_LATE") && atoi(getenv("VGPU_LATE"));       // asynchronous copies as late as CUDA allows
  }
};
static Config &config() { static Config *c = new Config; return *c; }

// ------------------------------------------------------------------------------------------------ counters and ranges

struct Tally { u64 n = 0, bytes = 0; void add(u64 b) { n++; bytes += b; } };
enum Kind { DEVICE, PINNED, REGISTERED, MANAGED, RESERVED };
struct Range { u64 size; Kind kind; int device; };

// Leaked on purpose: threads may call in while the process ends.
struct State {
  std::recursive_mutex lock;
  std::map<u64, Range> ranges;
  u64 used[16] = {}, peak[16] = {}, pinned = 0, pinned_peak = 0, managed = 0, managed_peak = 0;
  std::unordered_map<const void *, const char *> kernel_names;
  std::unordered_map<const void *, u64> launches;
  std::map<string, u64> calls;                   // library calls (cuBLAS, cuDNN), waits, allocations, events
  std::map<string, Tally> copies;                // "h2d pinned async" and so on
  std::map<string, u64> by_stream;               // launches and copies of each stream
  std::unordered_map<const void *, std::pair<void *, u64>> variables;
};
static State &S() { static State *s = new State; return *s; }
typedef std::lock_guard<std::recursive_mutex> Lock;
#define LOCK Lock lock_(S().lock)
static void count(const char *what, u64 n = 1) { LOCK; S().calls[what] += n; }

static thread_local int device_now = 0;
static thread_local cudaError_t last_error = cudaSuccess;
static cudaError_t fail(cudaError_t e) { return last_error = e; }

static std::map<u64, Range>::iterator find(const void *p) {
  auto it = S().ranges.upper_bound((u64)p);
  if (it == S().ranges.begin()) return S().ranges.end();
  --it;
  return (u64)p < it->first + it->second.size ? it : S().ranges.end();
}
static u64 rounded(u64 size) { return (size + 2 * MiB - 1) / (2 * MiB) * (2 * MiB); }  // what the card gives away at a time

static bool take(int device, u64 size) {  // of the card's memory
  State &s = S();
  if (s.used[device] + size + config().context > config().memory) return false;
  s.used[device] += size;
  if (s.used[device] > s.peak[device]) s.peak[device] = s.used[device];
  return true;
}
static void *map_pages(u64 size, int access) {
  void *p = mmap(nullptr, size + 2 * MiB, access, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) return nullptr;
  u64 start = ((u64)p + 2 * MiB - 1) / (2 * MiB) * (2 * MiB);
  if (start > (u64)p) munmap(p, start - (u64)p);
  u64 rest = (u64)p + 2 * MiB - start;
  if (rest) munmap((void *)(start + size), rest);
  return (void *)start;
}
static cudaError_t allocate(void **out, u64 size, Kind kind) {
  LOCK;
  State &s = S();
  *out = nullptr;
  if (!size) return cudaSuccess;
  u64 whole = kind == DEVICE ? rounded(size) : (size + 4095) / 4096 * 4096;
  if (kind == DEVICE && !take(device_now, whole)) return fail(cudaErrorMemoryAllocation);
  void *p = map_pages(whole, PROT_READ | PROT_WRITE);
  if (!p) {
    if (kind == DEVICE) s.used[device_now] -= whole;
    return fail(cudaErrorMemoryAllocation);
  }
  s.ranges[(u64)p] = {whole, kind, device_now};
  if (kind == PINNED && (s.pinned += whole) > s.pinned_peak) s.pinned_peak = s.pinned;
  if (kind == MANAGED && (s.managed += whole) > s.managed_peak) s.managed_peak = s.managed;
  s.calls[kind == DEVICE ? "cudaMalloc" : kind == PINNED ? "cudaHostAlloc" : "cudaMallocManaged"]++;
  *out = p;
  return cudaSuccess;
}
static void finish_all();
static cudaError_t release(void *p) {
  if (!p) return cudaSuccess;
  LOCK;
  finish_all();  // as cudaFree and cudaFreeHost do
  State &s = S();
  auto it = s.ranges.find((u64)p);
  if (it == s.ranges.end() || it->second.kind == REGISTERED) return fail(cudaErrorInvalidValue);
  Range r = it->second;
  if (r.kind == DEVICE) s.used[r.device] -= r.size, s.calls["cudaFree"]++;
  if (r.kind == PINNED) s.pinned -= r.size, s.calls["cudaFreeHost"]++;
  if (r.kind == MANAGED) s.managed -= r.size;
  munmap(p, r.size);
  s.ranges.erase(it);
  return cudaSuccess;
}

// ---------------------------------------------------------------------------------------------------- streams and events

// With VGPU_LATE=1 asynchronous copies wait in their stream until something waits for them: whoever reads too early
// reads old bytes, as on a card with a full queue.
struct Stream;
struct Work { void *to; const void *from; u64 size; int fill; Stream *other; u64 other_until; };
struct Stream { int id, priority; unsigned flags; std::deque<Work> queue; u64 done = 0; u64 issued() const { return done + queue.size(); } };
struct Event { Stream *stream = nullptr; u64 until = 0; bool recorded = false; unsigned flags = 0; std::chrono::steady_clock::time_point at; };

static std::vector<Stream *> &streams() { static auto *all = new std::vector<Stream *>{new Stream{0, 0, 0}}; return *all; }
static Stream *stream_of(const void *s) { return (u64)s <= 2 ? streams()[0] : (Stream *)s; }  // null, legacy, per thread
static string stream_name(const void *s) { return "stream " + std::to_string(stream_of(s)->id); }

static void run_until(Stream *s, u64 position) {
  while (s->done < position && !s->queue.empty()) {
    Work w = s->queue.front();
    s->queue.pop_front();
    s->done++;
    if (w.other) run_until(w.other, w.other_until);
    else if (w.from) memmove(w.to, w.from, w.size);
    else memset(w.to, w.fill, w.size);
  }
}
static void finish(Stream *s) { run_until(s, s->issued()); }
static void finish_all() { for (Stream *s : streams()) finish(s); }
// The legacy default stream and blocking streams wait for each other; torch's own streams do not block.
API void vgpu_before_kernel(const void *stream) {  // an emulated kernel runs now: all before it in its stream is done
  LOCK;
  finish(stream_of(stream));
}

API cudaError_t cudaStreamCreateWithPriority(cudaStream_t *out, unsigned flags, int priority) {
  LOCK;
  Stream *s = new Stream{(int)streams().size(), priority, flags};
  streams().push_back(s);
  *out = (cudaStream_t)s;
  return cudaSuccess;
}
API cudaError_t cudaStreamCreateWithFlags(cudaStream_t *out, unsigned flags) { return cudaStreamCreateWithPriority(out, flags, 0); }
API cudaError_t cudaStreamCreate(cudaStream_t *out) { return cudaStreamCreateWithPriority(out, 0, 0); }
API cudaError_t cudaStreamDestroy(cudaStream_t s) { LOCK; finish(stream_of(s)); return cudaSuccess; }
API cudaError_t cudaStreamGetPriority(cudaStream_t s, int *p) { *p = stream_of(s)->priority; return cudaSuccess; }
API cudaError_t cudaStreamGetFlags(cudaStream_t s, unsigned *f) { *f = stream_of(s)->flags; return cudaSuccess; }
API cudaError_t cudaStreamGetId(cudaStream_t s, u64 *id) { *id = stream_of(s)->id; return cudaSuccess; }
API cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { if (least) *least = 0; if (greatest) *greatest = -5; return cudaSuccess; }
API cudaError_t cudaStreamSynchronize(cudaStream_t s) { LOCK; count("wait: cudaStreamSynchronize"); finish(stream_of(s)); return cudaSuccess; }
API cudaError_t cudaDeviceSynchronize() { LOCK; count("wait: cudaDeviceSynchronize"); finish_all(); return cudaSuccess; }
API cudaError_t cudaStreamQuery(cudaStream_t s) {  // late: not ready, until somebody waits
  LOCK;
  return stream_of(s)->queue.empty() ? cudaSuccess : cudaErrorNotReady;
}
API cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned flags) { Event *n = new Event; n->flags = flags; *e = (cudaEvent_t)n; return cudaSuccess; }
API cudaError_t cudaEventCreate(cudaEvent_t *e) { return cudaEventCreateWithFlags(e, 0); }
API cudaError_t cudaEventDestroy(cudaEvent_t e) { delete (Event *)e; return cudaSuccess; }
API cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned) {
  LOCK;
  count("cudaEventRecord");
  Event *v = (Event *)e;
  v->stream = stream_of(s);
  v->until = v->stream->issued();
  v->recorded = true;
  v->at = std::chrono::steady_clock::now();
  return cudaSuccess;
}
API cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) { return cudaEventRecordWithFlags(e, s, 0); }
API cudaError_t cudaEventQuery(cudaEvent_t e) {
  LOCK;
  Event *v = (Event *)e;
  return !v->recorded || v->stream->done >= v->until ? cudaSuccess : cudaErrorNotReady;
}
API cudaError_t cudaEventSynchronize(cudaEvent_t e) {
  LOCK;
  count("wait: cudaEventSynchronize");
  Event *v = (Event *)e;
  if (v->recorded) run_until(v->stream, v->until);
  return cudaSuccess;
}
API cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t a, cudaEvent_t b) {
  Event *x = (Event *)a, *y = (Event *)b;
  if (!x->recorded || !y->recorded) return fail(cudaErrorInvalidResourceHandle);
  *ms = std::chrono::duration<float, std::milli>(y->at - x->at).count();
  return cudaSuccess;
}
API cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned) {
  LOCK;
  count("cudaStreamWaitEvent");
  Event *v = (Event *)e;
  if (config().late && v->recorded && v->stream != stream_of(s)) stream_of(s)->queue.push_back({nullptr, nullptr, 0, 0, v->stream, v->until});
  return cudaSuccess;
}
API cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus *s) { *s = cudaStreamCaptureStatusNone; return cudaSuccess; }
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus *s, u64 *id, cudaGraph_t *, const cudaGraphNode_t **, const cudaGraphEdgeData **, size_t *) {
  *s = cudaStreamCaptureStatusNone;
  if (id) *id = 0;
  return cudaSuccess;
}
API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode *) { return cudaSuccess; }
API cudaError_t cudaStreamBeginCapture(cudaStream_t, cudaStreamCaptureMode) { return fail(cudaErrorNotSupported); }  // no CUDA graphs
API cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t f, void *data) { { LOCK; finish(stream_of(s)); } f(data); return cudaSuccess; }
API cudaError_t cudaStreamAddCallback(cudaStream_t s, cudaStreamCallback_t f, void *data, unsigned) { { LOCK; finish(stream_of(s)); } f(s, cudaSuccess, data); return cudaSuccess; }

// ------------------------------------------------------------------------------------------------------------- memory

API cudaError_t cudaMalloc(void **p, size_t n) { return allocate(p, n, DEVICE); }
API cudaError_t cudaMallocAsync(void **p, size_t n, cudaStream_t) { return allocate(p, n, DEVICE); }
API cudaError_t cudaMallocManaged(void **p, size_t n, unsigned) { return allocate(p, n, MANAGED); }
API cudaError_t cudaHostAlloc(void **p, size_t n, unsigned) { return allocate(p, n, PINNED); }
API cudaError_t cudaMallocHost(void **p, size_t n) { return allocate(p, n, PINNED); }
API cudaError_t cudaFree(void *p) { return release(p); }
API cudaError_t cudaFreeAsync(void *p, cudaStream_t) { return release(p); }
API cudaError_t cudaFreeHost(void *p) { return release(p); }
API cudaError_t cudaHostRegister(void *p, size_t n, unsigned) {
  LOCK;
  State &s = S();
  if (find(p) != s.ranges.end()) return fail(cudaErrorHostMemoryAlreadyRegistered);
  s.ranges[(u64)p] = {n, REGISTERED, device_now};
  s.calls["cudaHostRegister"]++;
  if ((s.pinned += n) > s.pinned_peak) s.pinned_peak = s.pinned;
  return cudaSuccess;
}
API cudaError_t cudaHostUnregister(void *p) {
  LOCK;
  State &s = S();
  auto it = s.ranges.find((u64)p);
  if (it == s.ranges.end() || it->second.kind != REGISTERED) return fail(cudaErrorHostMemoryNotRegistered);
  finish_all();
  s.pinned -= it->second.size;
  s.ranges.erase(it);
  return cudaSuccess;
}
API cudaError_t cudaHostGetDevicePointer(void **d, void *h, unsigned) { *d = h; return cudaSuccess; }
API cudaError_t cudaMemGetInfo(size_t *free, size_t *total) {
  LOCK;
  *total = config().memory;
  u64 used = S().used[device_now] + config().context;
  *free = used < config().memory ? config().memory - used : 0;
  return cudaSuccess;
}
API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *a, const void *p) {
  LOCK;
  memset(a, 0, sizeof *a);
  auto it = find(p);
  a->type = cudaMemoryTypeUnregistered;
  a->device = -2;
  if (it == S().ranges.end()) return cudaSuccess;
  Kind k = it->second.kind;
  a->type = k == DEVICE || k == RESERVED ? cudaMemoryTypeDevice : k == MANAGED ? cudaMemoryTypeManaged : cudaMemoryTypeHost;
  a->device = it->second.device;
  a->devicePointer = (void *)p;
  a->hostPointer = a->type == cudaMemoryTypeDevice ? nullptr : (void *)p;
  return cudaSuccess;
}

static const char *place(const void *p) {
  auto it = find(p);
  if (it == S().ranges.end()) return "pageable";
  return it->second.kind == PINNED || it->second.kind == REGISTERED ? "pinned" : "device";
}
static void do_copy(void *to, const void *from, u64 n) {
  if (n <= config().copy_limit) memmove(to, from, n);
}
static void do_fill(void *to, int value, u64 n) {  // zeros cost no memory: whole pages are given back
  u64 first = ((u64)to + 4095) / 4096 * 4096, last = ((u64)to + n) / 4096 * 4096;
  if (value || last < first + 64 * 4096 || strcmp(place(to), "device")) { if (n <= config().copy_limit || !value) memset(to, value, n); return; }
  memset(to, 0, first - (u64)to);
  madvise((void *)first, last - first, MADV_DONTNEED);
  memset((void *)last, 0, (u64)to + n - last);
}
static cudaError_t copy(void *to, const void *from, u64 n, cudaStream_t stream, bool async) {
  if (!n) return cudaSuccess;
  LOCK;
  State &s = S();
  string a = place(from), b = place(to);
  string name = a == "device" && b == "device" ? "d2d" : b == "device" ? "h2d " + a : a == "device" ? "d2h " + b : "h2h";
  // A copy to or from pageable memory waits for the stream, whatever it is called; one from pageable memory returns
  // when the bytes have been read.
  bool waits = !async || a == "pageable" || b == "pageable";
  s.copies[name + (async ? " async" : " blocking")].add(n);
  s.by_stream[stream_name(stream) + " copies " + name]++;
  Stream *st = stream_of(stream);
  if (!async) s.calls["wait: cudaMemcpy"]++;
  else if (b == "pageable") s.calls["wait: cudaMemcpyAsync into pageable memory"]++;
  if (waits || !config().late) {
    if (async) finish(st); else finish_all();
    do_copy(to, from, n);
  } else if (n <= config().copy_limit) {
    st->queue.push_back({to, from, n, 0, nullptr, 0});
  }
  return cudaSuccess;
}
static cudaError_t fill(void *to, int value, u64 n, cudaStream_t stream) {
  if (!n) return cudaSuccess;
  LOCK;
  count("cudaMemset");
  S().by_stream[stream_name(stream) + " memsets"]++;
  if (config().late) finish(stream_of(stream));
  do_fill(to, value, n);
  return cudaSuccess;
}
API cudaError_t cudaMemcpy(void *to, const void *from, size_t n, cudaMemcpyKind) { return copy(to, from, n, nullptr, false); }
API cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t n, cudaMemcpyKind, cudaStream_t s) { return copy(to, from, n, s, true); }
API cudaError_t cudaMemcpyPeerAsync(void *to, int, const void *from, int, size_t n, cudaStream_t s) { return copy(to, from, n, s, true); }
API cudaError_t cudaMemcpy2DAsync(void *to, size_t tp, const void *from, size_t fp, size_t w, size_t h, cudaMemcpyKind, cudaStream_t s) {
  for (size_t i = 0; i < h; i++) copy((char *)to + i * tp, (const char *)from + i * fp, w, s, true);
  return cudaSuccess;
}
API cudaError_t cudaMemcpy2D(void *to, size_t tp, const void *from, size_t fp, size_t w, size_t h, cudaMemcpyKind k) { return cudaMemcpy2DAsync(to, tp, from, fp, w, h, k, nullptr); }
API cudaError_t cudaMemset(void *p, int v, size_t n) { return fill(p, v, n, nullptr); }
API cudaError_t cudaMemsetAsync(void *p, int v, size_t n, cudaStream_t s) { return fill(p, v, n, s); }
API cudaError_t cudaMemPrefetchAsync(const void *p, size_t, cudaMemLocation, unsigned, cudaStream_t) {
  LOCK;
  auto it = find(p);
  if (it == S().ranges.end() || it->second.kind != MANAGED) return fail(cudaErrorInvalidValue);
  count("cudaMemPrefetchAsync");
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *p, int) { *p = (cudaMemPool_t)16; return cudaSuccess; }
API cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t, cudaMemPoolAttr, void *v) { *(u64 *)v = 0; return cudaSuccess; }

// --------------------------------------------------------------------------------------------------- kernels and modules

struct Launch { dim3 grid, block; size_t shared; cudaStream_t stream; };
static thread_local std::vector<Launch> configured;

static cudaError_t launched(const void *function, cudaStream_t stream) {
  LOCK;
  S().launches[function]++;
  S().by_stream[stream_name(stream) + " launches"]++;
  return cudaSuccess;
}
API void **__cudaRegisterFatBinary(void *) { return (void **)calloc(1, sizeof(void *)); }
API void __cudaRegisterFatBinaryEnd(void **) {}
API void __cudaUnregisterFatBinary(void **) {}
API char __cudaInitModule(void **) { return 1; }
API void __cudaRegisterFunction(void **, const char *host, char *, const char *name, int, void *, void *, void *, void *, int *) { LOCK; S().kernel_names[host] = name; }
API void __cudaRegisterVar(void **, char *host, char *, const char *, int, size_t size, int, int) { LOCK; S().variables[host] = {nullptr, size}; }
API void __cudaRegisterManagedVar(void **, void **host, char *, const char *, int, size_t size, int, int) { *host = calloc(1, size); }
API unsigned __cudaPushCallConfiguration(dim3 g, dim3 b, size_t shared, cudaStream_t s) { configured.push_back({g, b, shared, s}); return 0; }
API cudaError_t __cudaPopCallConfiguration(dim3 *g, dim3 *b, size_t *shared, void *s) {
  if (configured.empty()) return cudaErrorMissingConfiguration;
  Launch l = configured.back();
  configured.pop_back();
  *g = l.grid, *b = l.block, *shared = l.shared, *(cudaStream_t *)s = l.stream;
  return cudaSuccess;
}
API cudaError_t __cudaGetKernel(cudaKernel_t *k, const void *f) { *k = (cudaKernel_t)f; return cudaSuccess; }
API cudaError_t __cudaLaunchKernel(cudaKernel_t k, dim3, dim3, void **, size_t, cudaStream_t s) { return launched(k, s); }
API cudaError_t __cudaLaunchKernel_ptsz(cudaKernel_t k, dim3, dim3, void **, size_t, cudaStream_t s) { return launched(k, s); }
API cudaError_t cudaLaunchKernel(const void *f, dim3, dim3, void **, size_t, cudaStream_t s) { return launched(f, s); }
API cudaError_t cudaLaunchCooperativeKernel(const void *f, dim3, dim3, void **, size_t, cudaStream_t s) { return launched(f, s); }
API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *c, const void *f, void **) { return launched(f, c->stream); }
API cudaError_t cudaGetFuncBySymbol(cudaFunction_t *f, const void *p) { *f = (cudaFunction_t)p; return cudaSuccess; }
API cudaError_t cudaGetSymbolAddress(void **p, const void *symbol) {
  LOCK;
  auto &v = S().variables[symbol];
  if (!v.first) v.first = calloc(1, v.second ? v.second : 4096);
  *p = v.first;
  return cudaSuccess;
}
API cudaError_t cudaMemcpyToSymbol(const void *symbol, const void *from, size_t n, size_t offset, cudaMemcpyKind) {
  void *p;
  cudaGetSymbolAddress(&p, symbol);
  memcpy((char *)p + offset, from, n);
  return cudaSuccess;
}
API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *a, const void *) {
  memset(a, 0, sizeof *a);
  a->maxThreadsPerBlock = 1024;
  a->numRegs = 32;
  a->ptxVersion = a->binaryVersion = config().card.major * 10 + config().card.minor;
  a->maxDynamicSharedSizeBytes = 49152;
  return cudaSuccess;
}
API cudaError_t cudaFuncSetAttribute(const void *, cudaFuncAttribute, int) { return cudaSuccess; }
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, const void *, int threads, size_t, unsigned) {
  *n = threads > 0 && threads <= 1024 ? config().card.threads_per_sm / threads : 1;
  return cudaSuccess;
}
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *n, const void *f, int threads, size_t shared) { return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(n, f, threads, shared, 0); }

// ------------------------------------------------------------------------------------------------------------ devices

API cudaError_t cudaGetDeviceCount(int *n) { *n = config().devices; return *n ? cudaSuccess : fail(cudaErrorNoDevice); }
API cudaError_t cudaGetDevice(int *d) { *d = device_now; return cudaSuccess; }
API cudaError_t cudaSetDevice(int d) { if (d < 0 || d >= config().devices) return fail(cudaErrorInvalidDevice); device_now = d; return cudaSuccess; }
API cudaError_t cudaDriverGetVersion(int *v) { *v = 13000; return cudaSuccess; }
API cudaError_t cudaRuntimeGetVersion(int *v) { *v = 13000; return cudaSuccess; }
API cudaError_t cudaDeviceCanAccessPeer(int *can, int, int) { *can = 0; return cudaSuccess; }
API cudaError_t cudaDeviceGetPCIBusId(char *id, int n, int d) { snprintf(id, n, "00000000:%02X:00.0", d + 1); return cudaSuccess; }
API cudaError_t cudaGetLastError() { cudaError_t e = last_error; last_error = cudaSuccess; return e; }
API cudaError_t cudaPeekAtLastError() { return last_error; }
API const char *cudaGetErrorName(cudaError_t e) {
  switch (e) {
    case cudaSuccess: return "cudaSuccess";
    case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
    case cudaErrorInvalidValue: return "cudaErrorInvalidValue";
    case cudaErrorNoDevice: return "cudaErrorNoDevice";
    case cudaErrorInvalidDevice: return "cudaErrorInvalidDevice";
    case cudaErrorNotReady: return "cudaErrorNotReady";
    case cudaErrorNotSupported: return "cudaErrorNotSupported";
    case cudaErrorHostMemoryAlreadyRegistered: return "cudaErrorHostMemoryAlreadyRegistered";
    case cudaErrorHostMemoryNotRegistered: return "cudaErrorHostMemoryNotRegistered";
    default: return "cudaError of the virtual GPU";
  }
}
API const char *cudaGetErrorString(cudaError_t e) {
  switch (e) {
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorInvalidValue: return "invalid argument";
    case cudaErrorNoDevice: return "no CUDA-capable device is detected";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    case cudaErrorNotReady: return "device not ready";
    case cudaErrorNotSupported: return "operation not supported";
    default: return cudaGetErrorName(e);
  }
}
static void uuid_of(int device, char *bytes) { memcpy(bytes, "virtual gpu 0000", 16); bytes[15] = '0' + device; }
API cudaError_t cudaGetDeviceProperties(cudaDeviceProp *p, int device) {
  const Card &c = config().card;
  memset(p, 0, sizeof *p);
  snprintf(p->name, sizeof p->name, "%s", c.name);
  uuid_of(device, p->uuid.bytes);
  p->totalGlobalMem = config().memory;
  p->sharedMemPerBlock = 49152;
  p->regsPerBlock = p->regsPerMultiprocessor = 65536;
  p->warpSize = 32;
  p->memPitch = 2147483647;
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024, p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647, p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->totalConstMem = 65536;
  p->major = c.major, p->minor = c.minor;
  p->textureAlignment = 512;
  p->multiProcessorCount = c.sms;
  p->canMapHostMemory = p->concurrentKernels = p->unifiedAddressing = p->managedMemory = p->concurrentManagedAccess = 1;
  p->pciBusID = device + 1;
  p->asyncEngineCount = 2;
  p->memoryBusWidth = 192;
  p->l2CacheSize = c.l2_mib * MiB;
  p->persistingL2CacheMaxSize = p->l2CacheSize / 2;
  p->maxThreadsPerMultiProcessor = c.threads_per_sm;
  p->sharedMemPerMultiprocessor = (c.shared_optin_kib + 1) * 1024;
  p->sharedMemPerBlockOptin = c.shared_optin_kib * 1024;
  p->reservedSharedMemPerBlock = 1024;
  p->maxBlocksPerMultiProcessor = 16;
  p->cooperativeLaunch = p->streamPrioritiesSupported = p->globalL1CacheSupported = p->localL1CacheSupported = 1;
  p->hostRegisterSupported = p->memoryPoolsSupported = 1;
  return cudaSuccess;
}
static int attribute(int a) {
  const Card &c = config().card;
  switch (a) {
    case cudaDevAttrMaxThreadsPerBlock: case cudaDevAttrMaxBlockDimX: case cudaDevAttrMaxBlockDimY: return 1024;
    case cudaDevAttrMaxBlockDimZ: return 64;
    case cudaDevAttrMaxGridDimX: return 2147483647;
    case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: return 65535;
    case cudaDevAttrMaxSharedMemoryPerBlock: return 49152;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return c.shared_optin_kib * 1024;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return (c.shared_optin_kib + 1) * 1024;
    case cudaDevAttrWarpSize: return 32;
    case cudaDevAttrMaxRegistersPerBlock: case cudaDevAttrMaxRegistersPerMultiprocessor: return 65536;
    case cudaDevAttrMultiProcessorCount: return c.sms;
    case cudaDevAttrMaxThreadsPerMultiProcessor: return c.threads_per_sm;
    case cudaDevAttrComputeCapabilityMajor: return c.major;
    case cudaDevAttrComputeCapabilityMinor: return c.minor;
    case cudaDevAttrL2CacheSize: return c.l2_mib * MiB;
    case cudaDevAttrClockRate: return 1700000;
    case cudaDevAttrMemoryClockRate: return 7500000;
    case cudaDevAttrGlobalMemoryBusWidth: return 192;
    case cudaDevAttrAsyncEngineCount: return 2;
    case cudaDevAttrMaxBlocksPerMultiprocessor: return 16;
    case cudaDevAttrCooperativeLaunch: case cudaDevAttrManagedMemory: case cudaDevAttrConcurrentManagedAccess:
    case cudaDevAttrUnifiedAddressing: case cudaDevAttrCanMapHostMemory: case cudaDevAttrHostRegisterSupported:
    case cudaDevAttrConcurrentKernels: case cudaDevAttrMemoryPoolsSupported: case cudaDevAttrStreamPrioritiesSupported: return 1;
    default: return 0;
  }
}
API cudaError_t cudaDeviceGetAttribute(int *v, cudaDeviceAttr a, int) { *v = attribute(a); return cudaSuccess; }

// --------------------------------------------------------------------------------- the few driver functions torch asks for

API CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
API CUresult cuDriverGetVersion(int *v) { *v = 13000; return CUDA_SUCCESS; }
API CUresult cuDeviceGetCount(int *n) { *n = config().devices; return CUDA_SUCCESS; }
API CUresult cuDeviceGet(CUdevice *d, int i) { *d = i; return CUDA_SUCCESS; }
API CUresult cuDeviceGetName(char *name, int n, CUdevice) { snprintf(name, n, "%s", config().card.name); return CUDA_SUCCESS; }
API CUresult cuDeviceGetAttribute(int *v, CUdevice_attribute a, CUdevice) {  // the runtime's numbers; address ranges can be mapped
  *v = a == CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED ? 1 : attribute(a);
  return CUDA_SUCCESS;
}
API CUresult cuDeviceTotalMem_v2(size_t *n, CUdevice) { *n = config().memory; return CUDA_SUCCESS; }
API CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned *flags, int *active) { *flags = 0, *active = 1; return CUDA_SUCCESS; }
API CUresult cuDevicePrimaryCtxRetain(CUcontext *c, CUdevice) { *c = (CUcontext)16; return CUDA_SUCCESS; }
API CUresult cuCtxGetCurrent(CUcontext *c) { *c = (CUcontext)16; return CUDA_SUCCESS; }
API CUresult cuCtxGetLimit(size_t *v, CUlimit) { *v = 0; return CUDA_SUCCESS; }
API CUresult cuCtxSetLimit(CUlimit, size_t) { return CUDA_SUCCESS; }
API CUresult cuCtxGetDevice(CUdevice *d) { *d = device_now; return CUDA_SUCCESS; }
API CUresult cuGetErrorString(CUresult e, const char **s) { *s = e == CUDA_ERROR_OUT_OF_MEMORY ? "out of memory" : "error of the virtual GPU"; return CUDA_SUCCESS; }
API CUresult cuModuleLoadData(CUmodule *m, const void *) { *m = (CUmodule)16; return CUDA_SUCCESS; }
API CUresult cuModuleLoadDataEx(CUmodule *m, const void *, unsigned, CUjit_option *, void **) { *m = (CUmodule)16; return CUDA_SUCCESS; }
API CUresult cuModuleGetFunction(CUfunction *f, CUmodule, const char *name) {
  LOCK;
  char *kept = strdup(name);
  S().kernel_names[kept] = kept;
  *f = (CUfunction)kept;
  return CUDA_SUCCESS;
}
API CUresult cuFuncGetAttribute(int *v, CUfunction_attribute a, CUfunction) { *v = a == CU_FUNC_ATTRIBUTE_NUM_REGS ? 32 : a == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0; return CUDA_SUCCESS; }
API CUresult cuLaunchKernel(CUfunction f, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream s, void **, void **) { launched(f, s); return CUDA_SUCCESS; }
API CUresult cuLaunchKernelEx(const CUlaunchConfig *c, CUfunction f, void **, void **) { launched(f, c->hStream); return CUDA_SUCCESS; }
API CUresult cuOccupancyMaxActiveClusters(int *n, CUfunction, const CUlaunchConfig *) { *n = 1; return CUDA_SUCCESS; }
API CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *n, CUfunction, int threads, size_t) { *n = config().card.threads_per_sm / (threads > 0 ? threads : 1); return CUDA_SUCCESS; }
API CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *size, CUdeviceptr p) {
  LOCK;
  auto it = find((void *)p);
  if (it == S().ranges.end()) return CUDA_ERROR_INVALID_VALUE;
  if (base) *base = it->first;
  if (size) *size = it->second.size;
  return CUDA_SUCCESS;
}
// Expandable segments: addresses first, memory later.
API CUresult cuMemGetAllocationGranularity(size_t *n, const CUmemAllocationProp *, CUmemAllocationGranularity_flags) { *n = 2 * MiB; return CUDA_SUCCESS; }
API CUresult cuMemAddressReserve(CUdeviceptr *p, size_t size, size_t, CUdeviceptr, u64) {
  LOCK;
  void *m = map_pages(size, PROT_NONE);
  if (!m) return CUDA_ERROR_OUT_OF_MEMORY;
  S().ranges[(u64)m] = {size, RESERVED, device_now};
  *p = (CUdeviceptr)m;
  return CUDA_SUCCESS;
}
API CUresult cuMemAddressFree(CUdeviceptr p, size_t size) { LOCK; S().ranges.erase(p); munmap((void *)p, size); return CUDA_SUCCESS; }
struct Physical { u64 size; int device; };
API CUresult cuMemCreate(CUmemGenericAllocationHandle *h, size_t size, const CUmemAllocationProp *prop, u64) {
  LOCK;
  int device = prop->location.type == CU_MEM_LOCATION_TYPE_DEVICE ? prop->location.id : 0;
  if (!take(device, size)) return CUDA_ERROR_OUT_OF_MEMORY;
  S().calls["cuMemCreate"]++;
  *h = (CUmemGenericAllocationHandle) new Physical{size, device};
  return CUDA_SUCCESS;
}
API CUresult cuMemRelease(CUmemGenericAllocationHandle h) {
  LOCK;
  Physical *p = (Physical *)h;
  S().used[p->device] -= p->size;
  S().calls["cuMemRelease"]++;
  delete p;
  return CUDA_SUCCESS;
}
API CUresult cuMemMap(CUdeviceptr p, size_t size, size_t, CUmemGenericAllocationHandle, u64) { return mprotect((void *)p, size, PROT_READ | PROT_WRITE) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS; }
API CUresult cuMemUnmap(CUdeviceptr p, size_t size) { madvise((void *)p, size, MADV_DONTNEED); return mprotect((void *)p, size, PROT_NONE) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS; }
API CUresult cuMemSetAccess(CUdeviceptr, size_t, const CUmemAccessDesc *, size_t) { return CUDA_SUCCESS; }

static int unanswered_driver_call() { return 0; }
API cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **f, unsigned, u64, cudaDriverEntryPointQueryResult *result) {
  string n = name;
  *f = nullptr;
  for (string tail : {"_v3", "_v2", ""})
    if (!*f) *f = dlsym(RTLD_DEFAULT, (n + tail).c_str());
  if (!*f) *f = (void *)unanswered_driver_call;
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
API CUresult cuGetProcAddress_v2(const char *name, void **f, int, cuuint64_t, CUdriverProcAddressQueryResult *r) {
  if (r) *r = CU_GET_PROC_ADDRESS_SUCCESS;
  return cudaGetDriverEntryPointByVersion(name, f, 0, 0, nullptr) ? CUDA_ERROR_NOT_FOUND : CUDA_SUCCESS;
}

// ------------------------------------------------------------------------------------------------ NVML (own structures)

struct NvmlMemory { u64 total, free, used; };
struct NvmlMemory2 { unsigned version; u64 total, reserved, free, used; };
struct NvmlProcess { unsigned pid; u64 used; unsigned gpu_instance, compute_instance; };
struct NvmlProcess1 { unsigned pid; u64 used; };
static int nvml_index(void *device) { return (int)(u64)device - 1; }
static u64 nvml_used(void *device) { LOCK; return S().used[nvml_index(device)] + config().context; }
API int nvmlInit_v2() { return 0; }
API int nvmlInitWithFlags(unsigned) { return 0; }
API int nvmlShutdown() { return 0; }
API const char *nvmlErrorString(int e) { return e ? "error of the virtual GPU" : "success"; }
API int nvmlSystemGetDriverVersion(char *v, unsigned n) { snprintf(v, n, "580.00.00"); return 0; }
API int nvmlSystemGetCudaDriverVersion_v2(int *v) { *v = 13000; return 0; }
API int nvmlDeviceGetCount_v2(unsigned *n) { *n = config().devices; return 0; }
API int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **d) { if ((int)i >= config().devices) return 2; *d = (void *)(u64)(i + 1); return 0; }
API int nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **d) { unsigned bus = 1; sscanf(id, "%*x:%x", &bus); *d = (void *)(u64)bus; return 0; }
API int nvmlDeviceGetUUID(void *d, char *u, unsigned n) {
  char b[16];
  uuid_of(nvml_index(d), b);
  string text = "GPU-";
  for (int i = 0; i < 16; i++) {
    char two[4];
    snprintf(two, sizeof two, "%02x", (unsigned char)b[i]);
    text += two;
    if (i == 3 || i == 5 || i == 7 || i == 9) text += "-";
  }
  snprintf(u, n, "%s", text.c_str());
  return 0;
}
API int nvmlDeviceGetHandleByUUID(const char *u, void **d) {
  for (int i = 0; i < config().devices; i++) {
    char own[64];
    nvmlDeviceGetUUID((void *)(u64)(i + 1), own, sizeof own);
    if (!strcmp(own, u)) { *d = (void *)(u64)(i + 1); return 0; }
  }
  return 6;
}
API int nvmlDeviceGetIndex(void *d, unsigned *i) { *i = nvml_index(d); return 0; }
API int nvmlDeviceGetName(void *, char *name, unsigned n) { snprintf(name, n, "%s", config().card.name); return 0; }
API int nvmlDeviceGetMemoryInfo(void *d, NvmlMemory *m) { u64 t = config().memory, u = nvml_used(d); *m = {t, t - u, u}; return 0; }
API int nvmlDeviceGetMemoryInfo_v2(void *d, NvmlMemory2 *m) { u64 t = config().memory, u = nvml_used(d); *m = {m->version, t, 0, t - u, u}; return 0; }
API int nvmlDeviceGetUtilizationRates(void *, unsigned *u) { u[0] = u[1] = 50; return 0; }
API int nvmlDeviceGetTemperature(void *, int, unsigned *t) { *t = 40; return 0; }
API int nvmlDeviceGetPowerUsage(void *, unsigned *p) { *p = 100000; return 0; }
API int nvmlDeviceGetCudaComputeCapability(void *, int *a, int *b) { *a = config().card.major, *b = config().card.minor; return 0; }
API int nvmlDeviceGetMigMode(void *, unsigned *, unsigned *) { return 3; }  // 3: not supported
API int nvmlDeviceGetNvLinkRemoteDeviceType(void *, unsigned, int *) { return 3; }
API int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *, unsigned, void *) { return 3; }
API int nvmlDeviceGetGpuFabricInfoV(void *, void *) { return 3; }
API int nvmlDeviceGetComputeRunningProcesses_v3(void *d, unsigned *n, NvmlProcess *p) {
  if (*n < 1 || !p) { *n = 1; return 7; }
  *n = 1, p[0] = {(unsigned)getpid(), nvml_used(d), ~0u, ~0u};
  return 0;
}
API int nvmlDeviceGetComputeRunningProcesses_v2(void *d, unsigned *n, NvmlProcess *p) { return nvmlDeviceGetComputeRunningProcesses_v3(d, n, p); }
API int nvmlDeviceGetComputeRunningProcesses(void *d, unsigned *n, NvmlProcess1 *p) {
  if (*n < 1 || !p) { *n = 1; return 7; }
  *n = 1, p[0] = {(unsigned)getpid(), nvml_used(d)};
  return 0;
}

// -------------------------------------------------------------------------------------------- libraries: cuBLAS and cuDNN

// build.sh generates a stub for every other function that torch or bitsandbytes takes from these libraries: it counts
// the call and says success. These write to what they are given.
API int vgpu_library_call(const char *name) { LOCK; S().calls[string("library: ") + name]++; return 0; }
static int handle(void **h) { *h = calloc(1, 256); return 0; }  // freed by nobody: small, and few
API int cublasCreate_v2(void **h) { return handle(h); }
API int cublasGetMathMode(void *, int *m) { *m = 0; return 0; }
API int cublasGetPointerMode_v2(void *, int *m) { *m = 0; return 0; }
API int cublasGetVersion_v2(void *, int *v) { *v = 130101; return 0; }
API int cublasSetStream_v2(void *, void *) { return 0; }
API int cublasSetMathMode(void *, int) { return 0; }
API int cublasSetPointerMode_v2(void *, int) { return 0; }
API int cublasSetWorkspace_v2(void *, void *, size_t) { return 0; }
API const char *cublasGetStatusString(int) { return "status of the virtual GPU"; }
API size_t cublasLtGetVersion() { return 130101; }
API int cublasLtCreate(void **h) { return handle(h); }
API int cublasLtMatmulDescCreate(void **h, int, int) { return handle(h); }
API int cublasLtMatmulPreferenceCreate(void **h) { return handle(h); }
API int cublasLtMatrixLayoutCreate(void **h, int, u64, u64, long long) { return handle(h); }
API int cublasLtMatmulDescDestroy(void *h) { free(h); return 0; }
API int cublasLtMatmulPreferenceDestroy(void *h) { free(h); return 0; }
API int cublasLtMatrixLayoutDestroy(void *h) { free(h); return 0; }
API int cublasLtMatmulDescSetAttribute(void *, int, const void *, size_t) { return 0; }
API int cublasLtMatmulPreferenceSetAttribute(void *, int, const void *, size_t) { return 0; }
API int cublasLtMatrixLayoutSetAttribute(void *, int, const void *, size_t) { return 0; }
struct Heuristic { u64 algo[8]; size_t workspace; int state; float waves; int reserved[4]; };  // cublasLtMatmulHeuristicResult_t
API int cublasLtMatmulAlgoGetHeuristic(void *, void *, void *, void *, void *, void *, void *, int asked, Heuristic *r, int *n) {
  *n = asked > 0;
  if (*n) memset(r, 0, sizeof *r), r->waves = 1;
  return 0;
}
API int cudnnCreate(void **h) { return handle(h); }
API int cudnnGetStream(void *, void **s) { *s = nullptr; return 0; }
API int cudnnSetStream(void *, void *) { return 0; }
API size_t cudnnGetVersion() { return 92400; }
API size_t cudnnGetCudartVersion() { return 13000; }
API const char *cudnnGetErrorString(int) { return "status of the virtual GPU"; }
API void cudnnGetLastErrorString(char *s, size_t n) { snprintf(s, n, "error of the virtual GPU"); }
API int cudnnGetProperty(int which, int *v) { *v = which == 0 ? 9 : which == 1 ? 24 : 0; return 0; }

// ------------------------------------------------------------------------------------------------------------- reports

static string quoted(const string &s) {
  string out = "\"";
  for (char c : s) { if (c == '"' || c == '\\') out += '\\'; out += c; }
  return out + "\"";
}
// All counters as JSON. The caller frees nothing; the text is valid until the next call.
API const char *vgpu_report() {
  LOCK;
  State &s = S();
  static string *out = new string;
  std::map<string, u64> kernels;
  u64 launches = 0;
  for (auto &l : s.launches) {
    auto named = s.kernel_names.find(l.first);
    const char *mangled = named == s.kernel_names.end() ? "?" : named->second;
    int status;
    char *plain = abi::__cxa_demangle(mangled, nullptr, nullptr, &status);
    kernels[plain ? plain : mangled] += l.second;
    free(plain);
    launches += l.second;
  }
  auto object = [](const std::map<string, u64> &m) {
    string t = "{";
    for (auto &e : m) t += (t.size() > 1 ? "," : "") + quoted(e.first) + ":" + std::to_string(e.second);
    return t + "}";
  };
  string copies = "{";
  for (auto &c : s.copies) copies += (copies.size() > 1 ? "," : "") + quoted(c.first) + ":[" + std::to_string(c.second.n) + "," + std::to_string(c.second.bytes) + "]";
  *out = "{\"launches\":" + std::to_string(launches) + ",\"kernels\":" + object(kernels) + ",\"calls\":" + object(s.calls) + ",\"copies\":" + copies +
         "},\"by_stream\":" + object(s.by_stream) + ",\"device_bytes\":" + std::to_string(s.used[0]) + ",\"device_peak\":" + std::to_string(s.peak[0]) +
         ",\"pinned_bytes\":" + std::to_string(s.pinned) + ",\"pinned_peak\":" + std::to_string(s.pinned_peak) + ",\"managed_bytes\":" + std::to_string(s.managed) +
         ",\"managed_peak\":" + std::to_string(s.managed_peak) + "}";
  return out->c_str();
}
API void vgpu_reset() {
  LOCK;
  State &s = S();
  s.launches.clear(), s.calls.clear(), s.copies.clear(), s.by_stream.clear();
  memcpy(s.peak, s.used, sizeof s.peak);
  s.pinned_peak = s.pinned, s.managed_peak = s.managed;
}
API void vgpu_set_memory(u64 bytes) { LOCK; config().memory = bytes; }  // another job on the card takes or gives back memory
