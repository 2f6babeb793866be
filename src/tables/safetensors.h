// Safetensors files: 8 bytes little-endian header length, a JSON header, then the tensors' bytes.
//
// Reading is strict. Refused, as Error{io} with the path: a header that is longer than the file or
// not exactly one JSON object, duplicate or unknown keys, unknown dtypes, negative dimensions, more
// than kMaxRank of them, sizes beyond 64 bits, offsets that overlap, leave gaps or do not match
// shape x dtype, bytes missing or left over, and BOOL bytes other than 0 and 1 (reading one as a
// C++ bool is undefined).
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/aligned_buffer.h"
#include "core/file_io.h"
#include "ehc/tensor.h"

namespace ehc::tables {

using Metadata = std::map<std::string, std::string>;

struct SafetensorsEntry {
  std::string name;
  DType dtype = DType::none;
  int rank = 0;
  int64_t shape[kMaxRank] = {};
  uint64_t begin = 0;  // first byte, counted from the start of the data section
  uint64_t end = 0;    // one past the last byte
};

struct SafetensorsHeader {
  std::vector<SafetensorsEntry> entries;  // in the order of their bytes
  Metadata metadata;
  uint64_t data_start = 0;  // first byte of the data section in the file
};

// Header only: what a table needs that reads single rows out of a large shard.
[[nodiscard]] SafetensorsHeader read_safetensors_header(const InputFile& file);

// A whole file in memory. Every tensor is a contiguous view aligned to kDataAlignment bytes,
// whatever its position in the file; views live as long as the object (moving keeps them valid).
class SafetensorsFile {
 public:
  [[nodiscard]] static SafetensorsFile open(const std::string& path);
  // The same from memory; `path` is only used in error texts.
  [[nodiscard]] static SafetensorsFile parse(std::string_view bytes, const std::string& path);

  [[nodiscard]] const std::map<std::string, Tensor>& tensors() const { return tensors_; }
  [[nodiscard]] const Metadata& metadata() const { return metadata_; }
  // The named tensor, or an absent one.
  [[nodiscard]] Tensor find(const std::string& name) const;

 private:
  template <class ReadBytes>
  SafetensorsFile(SafetensorsHeader header, const std::string& path, const ReadBytes& read_bytes);

  AlignedBuffer memory_;
  std::map<std::string, Tensor> tensors_;
  Metadata metadata_;
};

struct NamedTensor {
  std::string name;
  Tensor tensor;  // contiguous, in host memory
};

// Writes `path` atomically (see write_file). The bytes depend only on the arguments: tensors are
// ordered by element size, largest first, then by name, which aligns every tensor to its element;
// the data section starts at a multiple of 8. Error{contract} names a tensor that cannot be
// written, Error{io} the path.
void write_safetensors(const std::string& path, std::span<const NamedTensor> tensors,
                       const Metadata& metadata = {});

// The bytes that write_safetensors puts into the file.
[[nodiscard]] std::string format_safetensors(std::span<const NamedTensor> tensors,
                                             const Metadata& metadata = {});

}  // namespace ehc::tables
