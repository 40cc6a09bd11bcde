// Ends the program with the line of the first condition that does not hold.
#pragma once

#include <cstdio>
#include <cstdlib>

#define CHECK(condition)                           \
  if (!(condition)) {                              \
    std::printf("%d: %s\n", __LINE__, #condition); \
    std::exit(1);                                  \
  }
