// CHECK(condition) prints the line and ends the program if the condition does not hold.
#pragma once

#include <cstdio>
#include <cstdlib>

#define CHECK(condition)                             \
  do {                                               \
    if (!(condition)) {                              \
      std::printf("%d: %s\n", __LINE__, #condition); \
      std::exit(1);                                  \
    }                                                \
  } while (false)
