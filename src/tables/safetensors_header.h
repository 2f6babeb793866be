// The JSON header of a safetensors file, without the file around it.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "tables/safetensors.h"

namespace ehc::tables {

inline constexpr uint64_t kHeaderLengthBytes = 8;

// Little-endian length in the first 8 bytes, checked against the size of the file.
[[nodiscard]] uint64_t parse_header_length(const unsigned char (&bytes)[kHeaderLengthBytes],
                                           uint64_t file_size, const std::string& path);

// `data_bytes` is the size of the data section, which the tensors must fill exactly.
[[nodiscard]] SafetensorsHeader parse_header(std::string_view json, uint64_t data_bytes,
                                             const std::string& path);

// Header with its length in front, padded to a multiple of 8. Entries appear in the given order.
[[nodiscard]] std::string format_header(const SafetensorsHeader& header);

}  // namespace ehc::tables
