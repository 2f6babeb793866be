// Any bytes: the safetensors reader refuses them with Error{io}, or what it read can be written and
// read again with the same content.
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string_view>
#include <vector>

#include "ehc/error.h"
#include "tables/safetensors.h"

namespace {

void require(bool condition) {
  if (!condition) std::abort();
}

void check_round_trip(const ehc::tables::SafetensorsFile& file) {
  std::vector<ehc::tables::NamedTensor> tensors;
  for (const auto& [name, tensor] : file.tensors()) tensors.push_back({name, tensor});
  const std::string bytes = ehc::tables::format_safetensors(tensors, file.metadata());
  const auto again = ehc::tables::SafetensorsFile::parse(bytes, "again");
  require(again.metadata() == file.metadata());
  require(again.tensors().size() == file.tensors().size());
  for (const auto& [name, tensor] : file.tensors()) {
    const ehc::Tensor other = again.find(name);
    require(other.dtype == tensor.dtype && other.rank == tensor.rank);
    require(std::memcmp(other.shape, tensor.shape, sizeof(tensor.shape)) == 0);
    const size_t size = static_cast<size_t>(tensor.numel()) * ehc::size_of(tensor.dtype);
    require(std::memcmp(other.data, tensor.data, size) == 0);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  try {
    check_round_trip(ehc::tables::SafetensorsFile::parse(bytes, "fuzz"));
  } catch (const ehc::Error& error) {
    require(error.kind() == ehc::ErrorKind::io);
  }
  return 0;
}
