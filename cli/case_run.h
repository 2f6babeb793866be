// One run of a case: inputs placed in memory in some layout, outputs poisoned, the surroundings of
// every tensor guarded.
#pragma once

#include <string>
#include <vector>

#include "cli/case_inputs.h"

namespace ehc::cli {

enum class Layout {
  contiguous,
  strided,     // rows 3 elements apart, tokens 5 more: no row is aligned
  padded,      // rows and tokens apart by whole cache lines: rows stay aligned
  misaligned,  // contiguous, one element past an aligned address
  aliased,     // outputs that may share an input's memory do
};
inline constexpr Layout kLayouts[] = {Layout::contiguous, Layout::strided, Layout::padded,
                                      Layout::misaligned, Layout::aliased};
std::string_view name_of(Layout layout);

// A tensor in storage of its own, in a layout, with guards on both sides.
class PlacedTensor {
 public:
  // `like` gives dtype and shape, and its data the values unless that is null (poison then).
  PlacedTensor(const Context& context, const Tensor& like, Layout layout, bool packed,
               int lead_rank, unsigned char poison);
  [[nodiscard]] const Tensor& view() const { return view_; }
  // The elements, contiguous, fetched from the device.
  [[nodiscard]] std::vector<std::byte> elements() const;
  // Whether the bytes around the elements, and with `values` the elements too, are as placed.
  [[nodiscard]] bool intact(bool values) const;

 private:
  Buffer memory_;
  std::vector<std::byte> original_;
  size_t offset_ = 0;
  Tensor view_;
};

struct RunOptions {
  std::string implementation;
  Layout layout = Layout::contiguous;
  unsigned char poison = 0xcd;
};

struct RunResult {
  struct Output {
    size_t slot = 0;
    Tensor tensor;  // contiguous, in host memory
  };
  std::string refusal;  // the implementation or the layout does not take this call
  std::string damage;   // memory was written that is not an output's
  std::vector<Output> outputs;
  std::vector<std::vector<std::byte>> memory;
};

// Runs a case on a context. `tensors` by slot; contract violations throw.
RunResult run_case(const CaseInputs& inputs, const std::vector<Tensor>& tensors, Context& context,
                   const RunOptions& options);

// Calls visit(byte offset in the view, byte offset in a contiguous tensor, bytes) for each row.
template <class Visit>
void for_each_row(const Tensor& t, const Visit& visit) {
  if (t.numel() == 0) return;
  const size_t size = size_of(t.dtype);
  const int64_t row = t.rank > 0 ? t.shape[t.rank - 1] : 1;
  int64_t at[kMaxRank] = {};
  for (int64_t done = 0;; done += row) {
    int64_t offset = 0;
    for (int k = 0; k + 1 < t.rank; ++k) offset += at[k] * t.stride[k];
    visit(static_cast<size_t>(offset) * size, static_cast<size_t>(done) * size,
          static_cast<size_t>(row) * size);
    int k = t.rank - 2;
    for (; k >= 0 && ++at[k] == t.shape[k]; --k) at[k] = 0;
    if (k < 0) return;
  }
}

}  // namespace ehc::cli
