#define XXH_INLINE_ALL
#include "cli/checksum.h"

#include <fmt/format.h>
#include <xxhash.h>

#include "core/tensor_bytes.h"

namespace ehc::cli {

struct Checksum::State {
  XXH64_state_t xxh64;
};

Checksum::Checksum() : state_(std::make_unique<State>()) { XXH64_reset(&state_->xxh64, 0); }
Checksum::~Checksum() = default;

void Checksum::add(const Tensor& tensor) {
  XXH64_update(&state_->xxh64, tensor.data, bytes_of(tensor));
}

std::string Checksum::text() const { return fmt::format("{:016x}", XXH64_digest(&state_->xxh64)); }

}  // namespace ehc::cli
