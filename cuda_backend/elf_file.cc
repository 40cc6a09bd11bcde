#include "elf_file.h"

#include <elf.h>
#include <sys/stat.h>

#include <cstdint>
#include <fstream>

namespace attn_dispatch {

Status check_library_file(const std::string& path) {
  struct stat found{};
  if (stat(path.c_str(), &found) == 0 && !S_ISREG(found.st_mode)) {
    return {Code::kLibrary, "cuDNN could not be loaded: " + path + " is not a file"};
  }
  std::ifstream file(path, std::ios::binary);
  file.seekg(0, std::ios::end);
  const auto bytes = static_cast<uint64_t>(file.tellg());
  const auto read = [&](uint64_t offset, auto* header) -> bool {
    file.seekg(static_cast<std::streamoff>(offset));
    return static_cast<bool>(file.read(reinterpret_cast<char*>(header), sizeof *header));
  };
  Elf64_Ehdr header;
  if (!file || !read(0, &header) || std::string(header.e_ident, header.e_ident + SELFMAG) != ELFMAG)
    return {};
  for (uint64_t i = 0; i < header.e_phnum; ++i) {
    Elf64_Phdr segment;
    if (!read(header.e_phoff + i * sizeof segment, &segment)) return {};
    uint64_t end = 0;
    if (segment.p_type != PT_LOAD) continue;
    if (__builtin_add_overflow(segment.p_offset, segment.p_filesz, &end) || end > bytes) {
      return {Code::kLibrary, path + " is cut off: it has " + std::to_string(bytes) +
                                  " bytes, and segment " + std::to_string(i) + " ends at " +
                                  std::to_string(end)};
    }
  }
  return {};
}

}  // namespace attn_dispatch
