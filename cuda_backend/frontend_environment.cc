// Gives a variable that cudnn-frontend reads a default. cudnn-frontend is headers only, so its
// calls of getenv are this library's, and the linker sends them here (--wrap in CMakeLists.txt).
// Setting the variable instead would change the environment of the whole process while its threads
// read it.
#include <cstring>

extern "C" {

char* __real_getenv(const char* name);

char* __wrap_getenv(const char* name) {
  // 0 unless the user has set it: deterministic backward passes on SM90 then get plans whose
  // workspace grows with the length and not with its square. They need cuDNN 9.25.
  static char no_quadratic_workspace[] = "0";
  char* value = __real_getenv(name);
  if (value || std::strcmp(name, "CUDNN_FRONTEND_ATTN_DP_WORKSPACE_LIMIT") != 0) return value;
  return no_quadratic_workspace;
}

}  // extern "C"
