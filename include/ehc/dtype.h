// Element types of tensors. The names printed are those of safetensors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace ehc {

enum class DType : uint8_t {
  none,  // the tensor is absent
  f32,
  f16,
  bf16,
  f8_e4m3,
  f8_e8m0,
  i64,
  i32,
  u8,
  boolean,
};

inline constexpr int kDTypeCount = 10;

// Bytes of one element; 0 for none and for a value that is no type.
constexpr size_t size_of(DType type) {
  constexpr size_t kBytes[kDTypeCount] = {0, 4, 2, 2, 1, 1, 8, 4, 1, 1};
  return static_cast<int>(type) < kDTypeCount ? kBytes[static_cast<size_t>(type)] : 0;
}

// Safetensors name, e.g. "BF16"; "absent" for none, "unknown type" for a value that is no type.
constexpr std::string_view name_of(DType type) {
  constexpr std::string_view kNames[kDTypeCount] = {"absent",  "F32", "F16", "BF16", "F8_E4M3",
                                                    "F8_E8M0", "I64", "I32", "U8",   "BOOL"};
  return static_cast<int>(type) < kDTypeCount ? kNames[static_cast<size_t>(type)] : "unknown type";
}

// Inverse of name_of; empty when the name is unknown.
constexpr std::optional<DType> dtype_from_name(std::string_view name) {
  for (int i = 1; i < kDTypeCount; ++i) {
    if (name_of(static_cast<DType>(i)) == name) return static_cast<DType>(i);
  }
  return std::nullopt;
}

}  // namespace ehc
