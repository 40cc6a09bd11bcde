#include "library.h"

#include <dlfcn.h>
#include <glob.h>

#include <array>
#include <atomic>
#include <map>
#include <mutex>
#include <vector>

// cudnn-frontend's dynamic loading resolves every cuDNN symbol through this handle.
namespace cudnn_frontend {
void* cudnn_dlhandle = nullptr;
}

namespace attn_dispatch {
namespace {

// The oldest version that plans from device properties and that a JAX we support can ship with
// (jax-cuda13-plugin asks for nvidia-cudnn-cu13>=9.12).
constexpr int64_t kOldestVersion = 91200;
constexpr int64_t kFirstUnknownVersion = 100000;

struct Driver {
  void* handle;
  bool is_stand_in;
};

struct Cudnn {
  void* handle;
  int64_t version;
  std::string path;
};

// Set once, by a thread that holds the loading mutex, and read without it. Leaked on purpose, like
// every singleton here: threads may outlive static destruction.
std::atomic<const Driver*> driver{nullptr};
std::atomic<const Cudnn*> cudnn{nullptr};

std::mutex& loading_mutex() {
  static auto* instance = new std::mutex;
  return *instance;
}

std::string loader_error() {
  const char* text = dlerror();
  return text ? text : "no reason given";
}

std::string file_of(void* symbol) {
  Dl_info info;
  return dladdr(symbol, &info) && info.dli_fname ? info.dli_fname : "";
}

std::string beside_this_library(const std::string& file_name) {
  const std::string self = file_of(reinterpret_cast<void*>(&load_cudnn));
  return self.substr(0, self.rfind('/') + 1) + file_name;
}

// Opens a stand-in that was built beside this library. It has the soname of the real library, so a
// later dlopen of that name in cuDNN finds it loaded.
void* open_stand_in(const std::string& name) {
  return dlopen(beside_this_library("libattn_dispatch_" + name + ".so").c_str(), RTLD_NOW);
}

Status load_driver() {
  if (driver.load()) return {};
  if (void* handle = dlopen("libcuda.so.1", RTLD_NOW)) {
    driver = new Driver{handle, /*is_stand_in=*/false};
    return {};
  }
  return {Code::kLibrary, "no CUDA driver library could be loaded: " + loader_error()};
}

Status load_stand_ins(const std::string& why) {
  void* handle = open_stand_in("no_driver");
  if (!handle) {
    return {Code::kLibrary, "cuDNN needs a CUDA driver library even to plan: " + why +
                                "; nor could the stand-in: " + loader_error()};
  }
  driver = new Driver{handle, /*is_stand_in=*/true};
  // Planning asks cuBLASLt for its version, and aborts the process without that library.
  for (const char* major : {"12", "13"}) open_stand_in(std::string("no_cublaslt") + major);
  return {};
}

// The paths of the files in `folder` whose names match a glob pattern.
std::vector<std::string> matching_files(const std::string& folder, const std::string& pattern) {
  std::string path;
  for (char letter : folder) {
    if (std::string("*?[\\").find(letter) != std::string::npos) path += '\\';
    path += letter;
  }
  path += pattern;
  glob_t found{};
  std::vector<std::string> files;
  if (glob(path.c_str(), 0, nullptr, &found) == 0) {
    files.assign(found.gl_pathv, found.gl_pathv + found.gl_pathc);
  }
  globfree(&found);
  return files;
}

// cuDNN is several libraries. libcudnn.so.9 opens the others on first use, and ends the process if
// there is no libcudnn_graph, which it looks for beside itself and then where the loader looks. Of
// the other libraries it reports a missing one as an error.
Status open_graph_library(const std::string& cudnn_path, void** handle) {
  const std::string folder = cudnn_path.substr(0, cudnn_path.rfind('/') + 1);
  const std::string name = "libcudnn_graph.so";
  const std::string beside = folder + name;
  std::vector<std::string> candidates = {beside + ".9", beside};
  for (const std::string& file : matching_files(folder, name + ".9.*")) candidates.push_back(file);
  candidates.insert(candidates.end(), {name + ".9", name});
  std::string why;
  for (const std::string& candidate : candidates) {
    *handle = dlopen(candidate.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (*handle) return {};
    if (const std::string error = loader_error(); why.empty()) why = error;
  }
  return {Code::kLibrary, "cuDNN at " + cudnn_path + " is incomplete: " + why};
}

template <typename Function>
Function* symbol(void* handle, const char* name) {
  return reinterpret_cast<Function*>(dlsym(handle, name));
}

// Handles that ended threads gave back, by device. Making one costs milliseconds and device memory.
struct HandlePool {
  std::mutex mutex;
  std::map<int32_t, std::vector<cudnnHandle_t>> free;
};

HandlePool& handle_pool() {
  static auto* instance = new HandlePool;
  return *instance;
}

// A handle, and the stream that it is bound to.
struct BoundHandle {
  cudnnHandle_t handle = nullptr;
  cudaStream_t stream = nullptr;
  bool is_bound = false;
};

struct ThreadHandles {
  std::array<BoundHandle, kMaxDevices> by_device;

  ~ThreadHandles() {
    HandlePool& pool = handle_pool();
    std::lock_guard<std::mutex> lock(pool.mutex);
    for (int32_t device = 0; device < kMaxDevices; ++device) {
      if (cudnnHandle_t handle = by_device[device].handle) pool.free[device].push_back(handle);
    }
  }
};

cudnnHandle_t take_free_handle(int32_t device) {
  HandlePool& pool = handle_pool();
  std::lock_guard<std::mutex> lock(pool.mutex);
  auto& free = pool.free[device];
  if (free.empty()) return nullptr;
  cudnnHandle_t handle = free.back();
  free.pop_back();
  return handle;
}

}  // namespace

Status check_ordinal(int32_t device_ordinal) {
  if (device_ordinal >= 0 && device_ordinal < kMaxDevices) return {};
  return {Code::kDevice, "device ordinal: expected 0 to " + std::to_string(kMaxDevices - 1) +
                             ", got " + std::to_string(device_ordinal)};
}

bool has_driver() {
  std::lock_guard<std::mutex> lock(loading_mutex());
  return load_driver().ok() && !driver.load()->is_stand_in;
}

std::string cudnn_file(const std::string& name) {
  if (name.find('/') != std::string::npos) return name;
  void* handle = dlopen(name.c_str(), RTLD_LAZY | RTLD_LOCAL);
  if (!handle) return "";
  const std::string file = file_of(dlsym(handle, "cudnnGetVersion"));
  dlclose(handle);
  return file;
}

Result<int64_t> load_cudnn(const std::string& path, bool allow_stand_ins) {
  std::lock_guard<std::mutex> lock(loading_mutex());
  if (const Cudnn* loaded = cudnn) return loaded->version;
  if (Status status = load_driver(); !status.ok()) {
    if (!allow_stand_ins) return status;
    ATTN_RETURN_IF_ERROR(load_stand_ins(status.message));
  }
  // Never RTLD_GLOBAL: other libraries must not find cuDNN's symbols.
  void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!handle) return Status{Code::kLibrary, "cuDNN could not be loaded: " + loader_error()};
  void* graph = nullptr;
  // Closed, so that the loader does not answer the next request with this library for its name.
  const auto refuse = [&](const std::string& message) {
    if (graph) dlclose(graph);
    dlclose(handle);
    return Status{Code::kLibrary, message};
  };
  auto* get_version = symbol<size_t()>(handle, "cudnnGetVersion");
  if (!get_version) return refuse(path + " has no cudnnGetVersion: not a cuDNN");
  const std::string file = file_of(reinterpret_cast<void*>(get_version));
  if (Status status = open_graph_library(file, &graph); !status.ok()) return refuse(status.message);
  const auto version = static_cast<int64_t>(get_version());
  if (version < kOldestVersion || version >= kFirstUnknownVersion) {
    return refuse("cuDNN " + std::to_string(version) + " at " + path +
                  " is out of range: expected at least " + std::to_string(kOldestVersion) +
                  " and below " + std::to_string(kFirstUnknownVersion));
  }
  cudnn_frontend::cudnn_dlhandle = handle;
  cudnn = new Cudnn{handle, version, file};
  return version;
}

int64_t cudnn_version() {
  const Cudnn* loaded = cudnn;
  return loaded ? loaded->version : 0;
}

std::string cudnn_path() {
  const Cudnn* loaded = cudnn;
  return loaded ? loaded->path : "";
}

bool driver_is_stand_in() {
  const Driver* loaded = driver;
  return loaded && loaded->is_stand_in;
}

Result<cudnnHandle_t> thread_handle(int32_t device_ordinal, cudaStream_t stream) {
  thread_local ThreadHandles mine;
  const Cudnn* loaded = cudnn;
  if (!loaded) return Status{Code::kLibrary, "cuDNN is not loaded"};
  ATTN_RETURN_IF_ERROR(check_ordinal(device_ordinal));
  BoundHandle& bound = mine.by_device[device_ordinal];
  // XLA's streams live as long as its client. cuDNN keeps a stream by its address alone.
  if (bound.is_bound && bound.stream == stream) return bound.handle;
  cudnnHandle_t& handle = bound.handle;
  if (!handle) handle = take_free_handle(device_ordinal);
  if (!handle) {
    static auto* create = symbol<int(cudnnHandle_t*)>(loaded->handle, "cudnnCreate");
    if (int status = create ? create(&handle) : -1; status != 0) {
      handle = nullptr;
      return Status{Code::kDevice, "cudnnCreate failed on device " +
                                       std::to_string(device_ordinal) + " with status " +
                                       std::to_string(status)};
    }
  }
  static auto* set_stream =
      symbol<int(cudnnHandle_t, cudaStream_t)>(loaded->handle, "cudnnSetStream");
  if (int status = set_stream ? set_stream(handle, stream) : -1; status != 0) {
    bound.is_bound = false;
    return Status{Code::kDevice, "cudnnSetStream failed with status " + std::to_string(status)};
  }
  bound.stream = stream;
  bound.is_bound = true;
  return handle;
}

void* driver_symbol(const char* name) {
  const Driver* loaded = driver;
  return loaded ? dlsym(loaded->handle, name) : nullptr;
}

Status fill(void* address, uint8_t value, size_t bytes, cudaStream_t stream) {
  if (bytes == 0) return {};
  static auto* memset_async =
      driver_symbol<int(unsigned long long, unsigned char, size_t, cudaStream_t)>(
          "cuMemsetD8Async");
  const auto device_address = reinterpret_cast<unsigned long long>(address);
  const int status = memset_async ? memset_async(device_address, value, bytes, stream) : -1;
  if (status == 0) return {};
  return {Code::kDevice, "cuMemsetD8Async failed with status " + std::to_string(status)};
}

Status copy(void* to, const void* from, size_t bytes, cudaStream_t stream) {
  if (bytes == 0) return {};
  using Copy = int(unsigned long long, unsigned long long, size_t, cudaStream_t);
  static auto* copy_async = driver_symbol<Copy>("cuMemcpyDtoDAsync_v2");
  const auto address = [](const void* pointer) {
    return reinterpret_cast<unsigned long long>(pointer);
  };
  const int status = copy_async ? copy_async(address(to), address(from), bytes, stream) : -1;
  if (status == 0) return {};
  return {Code::kDevice, "cuMemcpyDtoDAsync failed with status " + std::to_string(status)};
}

}  // namespace attn_dispatch
