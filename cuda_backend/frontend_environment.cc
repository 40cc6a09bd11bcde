// What cudnn-frontend reads in the environment. It is a library of headers, so its calls of getenv
// are this library's, and the linker sends them here (--wrap in CMakeLists.txt). Setting a variable
// instead would change the environment of everything else in the process, while its threads read
// it.
#include <cstring>

extern "C" {

char* __real_getenv(const char* name);

char* __wrap_getenv(const char* name) {
  // 0 unless the user has set it: plan deterministic backward passes on SM90 whose workspace grows
  // with the length and not with its square; they need cuDNN 9.25.
  static char no_quadratic_workspace[] = "0";
  char* value = __real_getenv(name);
  if (value || std::strcmp(name, "CUDNN_FRONTEND_ATTN_DP_WORKSPACE_LIMIT") != 0) return value;
  return no_quadratic_workspace;
}

}  // extern "C"
