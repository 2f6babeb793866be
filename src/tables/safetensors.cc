#include "tables/safetensors.h"

#include <algorithm>
#include <cstring>

#include "core/tensor_bytes.h"
#include "core/text.h"
#include "tables/safetensors_header.h"

namespace ehc::tables {
namespace {

uint64_t aligned_total(const SafetensorsHeader& header) {
  uint64_t total = 0;
  for (const SafetensorsEntry& entry : header.entries) total += align_up(entry.end - entry.begin);
  return total;
}

void check_size(uint64_t file_size, const std::string& path) {
  if (file_size < kHeaderLengthBytes) {
    throw_io(path, "safetensors: expected at least 8 bytes, got " + std::to_string(file_size));
  }
}

[[noreturn]] void throw_name(const std::string& name, const std::string& what) {
  throw Error(ErrorKind::contract, "safetensors: name " + in_quotes(name) + " " + what);
}

struct Formatted {
  std::string header;
  std::vector<std::string_view> parts;  // the header, then every tensor's bytes
};

// Built in place, because `parts` refers to `header`.
void format(std::span<const NamedTensor> tensors, const Metadata& metadata, Formatted& result) {
  std::vector<const NamedTensor*> order;
  for (const NamedTensor& item : tensors) order.push_back(&item);
  std::sort(order.begin(), order.end(), [](const NamedTensor* a, const NamedTensor* b) {
    const size_t size_a = size_of(a->tensor.dtype);
    const size_t size_b = size_of(b->tensor.dtype);
    return size_a != size_b ? size_a > size_b : a->name < b->name;
  });

  SafetensorsHeader header;
  header.metadata = metadata;
  std::map<std::string_view, int> seen;
  result.parts.resize(1);
  uint64_t position = 0;
  for (const NamedTensor* item : order) {
    if (seen[item->name]++ != 0) throw_name(item->name, "appears twice");
    if (item->name == "__metadata__") throw_name(item->name, "is reserved");
    const std::string_view bytes = writable_bytes(item->name, item->tensor);
    SafetensorsEntry& entry = header.entries.emplace_back();
    entry.name = item->name;
    entry.dtype = item->tensor.dtype;
    entry.rank = item->tensor.rank;
    std::copy_n(item->tensor.shape, kMaxRank, entry.shape);
    entry.begin = position;
    entry.end = position += bytes.size();
    result.parts.push_back(bytes);
  }
  result.header = format_header(header);
  result.parts[0] = result.header;
}

}  // namespace

SafetensorsHeader read_safetensors_header(const InputFile& file) {
  check_size(file.size(), file.path());
  unsigned char length_bytes[kHeaderLengthBytes];
  file.read(0, length_bytes, sizeof(length_bytes));
  const uint64_t length = parse_header_length(length_bytes, file.size(), file.path());
  const AlignedBuffer json(length);
  file.read(kHeaderLengthBytes, json.data(), length);
  const uint64_t data_start = kHeaderLengthBytes + length;
  SafetensorsHeader header = parse_header({reinterpret_cast<const char*>(json.data()), length},
                                          file.size() - data_start, file.path());
  header.data_start = data_start;
  return header;
}

// read_bytes(offset in the file, target, bytes) fills the target.
template <class ReadBytes>
SafetensorsFile::SafetensorsFile(SafetensorsHeader header, const std::string& path,
                                 const ReadBytes& read_bytes)
    : memory_(aligned_total(header)), metadata_(std::move(header.metadata)) {
  std::byte* target = memory_.data();
  for (const SafetensorsEntry& entry : header.entries) {
    const uint64_t bytes = entry.end - entry.begin;
    read_bytes(header.data_start + entry.begin, target, bytes);
    const Tensor tensor(target, entry.dtype, entry.shape, entry.rank);
    check_booleans(path, "safetensors: tensor " + in_quotes(entry.name), tensor);
    tensors_.emplace(entry.name, tensor);
    target += align_up(bytes);
  }
}

SafetensorsFile SafetensorsFile::open(const std::string& path) {
  const InputFile file(path);
  return {read_safetensors_header(file), path,
          [&](uint64_t offset, void* target, uint64_t bytes) { file.read(offset, target, bytes); }};
}

SafetensorsFile SafetensorsFile::parse(std::string_view bytes, const std::string& path) {
  check_size(bytes.size(), path);
  unsigned char length_bytes[kHeaderLengthBytes];
  std::memcpy(length_bytes, bytes.data(), sizeof(length_bytes));
  const uint64_t length = parse_header_length(length_bytes, bytes.size(), path);
  const uint64_t data_start = kHeaderLengthBytes + length;
  SafetensorsHeader header =
      parse_header(bytes.substr(kHeaderLengthBytes, length), bytes.size() - data_start, path);
  header.data_start = data_start;
  return {std::move(header), path, [&](uint64_t offset, void* target, uint64_t count) {
            if (count > 0) std::memcpy(target, bytes.data() + offset, count);
          }};
}

Tensor SafetensorsFile::find(const std::string& name) const {
  const auto found = tensors_.find(name);
  return found == tensors_.end() ? Tensor{} : found->second;
}

void write_safetensors(const std::string& path, std::span<const NamedTensor> tensors,
                       const Metadata& metadata) {
  Formatted formatted;
  format(tensors, metadata, formatted);
  write_file(path, formatted.parts);
}

std::string format_safetensors(std::span<const NamedTensor> tensors, const Metadata& metadata) {
  Formatted formatted;
  format(tensors, metadata, formatted);
  std::string result;
  for (const std::string_view part : formatted.parts) result += part;
  return result;
}

}  // namespace ehc::tables
