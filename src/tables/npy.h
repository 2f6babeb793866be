// NumPy's .npy files, versions 1 to 3: little-endian, C order, of the dtypes below.
#pragma once

#include <string>
#include <string_view>

#include "core/aligned_buffer.h"
#include "core/file_io.h"
#include "ehc/tensor.h"

namespace ehc::tables {

// An array read from a file. The view lives as long as the object (moving keeps it valid).
struct NpyArray {
  AlignedBuffer memory;
  Tensor tensor;  // contiguous, aligned to kDataAlignment
};

// '<f4' F32, '<f2' F16, '<i8' I64, '<i4' I32, '|u1' U8, '|b1' BOOL. Error{io} with the path for
// anything else: other dtypes, big-endian or Fortran order, more than kMaxRank dimensions, a
// malformed header, bytes missing or left over, BOOL bytes other than 0 and 1.
[[nodiscard]] NpyArray read_npy(const std::string& path);
// The same from memory; `path` is only used in error texts.
[[nodiscard]] NpyArray parse_npy(std::string_view bytes, const std::string& path);

// Version 1.0, atomically (see write_file). Error{contract} for a tensor that is not contiguous in
// host memory or whose dtype NumPy does not have.
void write_npy(const std::string& path, const Tensor& tensor);

}  // namespace ehc::tables
