// One run of a case: inputs placed in memory in some layout, outputs poisoned, the surroundings of
// every tensor guarded.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cli/case_inputs.h"
#include "cli/case_memory.h"

namespace ehc::cli {

enum class Layout {
  contiguous,
  strided,     // rows 3 elements apart, tokens 5 more: no row is aligned
  padded,      // rows and tokens apart by whole cache lines: rows stay aligned
  misaligned,  // contiguous, one element past an aligned address
  aliased,     // outputs that may share an input's memory do
  bare,  // allocations without guards, outputs never written before: for tools that watch memory
  far,   // tokens so far apart that offsets exceed 2^31 elements
};
// Those of every case; `bare` and `far` are asked for.
inline constexpr Layout kLayouts[] = {Layout::contiguous, Layout::strided, Layout::padded,
                                      Layout::misaligned, Layout::aliased};
std::string_view name_of(Layout layout);
std::optional<Layout> layout_from_name(std::string_view name);

// A tensor in a layout, with guards on both sides.
class PlacedTensor {
 public:
  // `like` gives dtype and shape, and its data the values unless that is null (poison then).
  PlacedTensor(const Tensor& like, Layout layout, bool packed, int lead_rank, unsigned char poison);
  // The bytes of memory that it takes, guards included.
  [[nodiscard]] size_t bytes() const {
    return static_cast<size_t>(pieces_ - 1) * piece_step_ + piece_bytes_;
  }
  void set_memory(const Context& context, void* memory);
  [[nodiscard]] const Tensor& view() const { return view_; }

  // What lies in memory: all of it or, of `far`, the elements of each token with guards, one after
  // the other. The image of what is to be placed there:
  [[nodiscard]] const std::vector<std::byte>& original() const { return original_; }
  // An output that is `bare` stays as it was allocated.
  [[nodiscard]] bool has_original() const { return has_original_; }
  // Calls move(at in memory, at in an image, bytes) for each piece of memory that is kept.
  template <class Move>
  void for_each_piece(const Move& move) const {
    for (size_t i = 0; i < static_cast<size_t>(pieces_); ++i) {
      move(i * piece_step_, i * piece_bytes_, piece_bytes_);
    }
  }

  // What an image has: the elements, contiguous, and whether they and the bytes around them are as
  // placed. The image is changed.
  struct Now {
    std::vector<std::byte> elements;
    bool same_elements = false;
    bool same_surroundings = false;
  };
  [[nodiscard]] Now now(std::span<std::byte> image) const;

 private:
  std::vector<std::byte> original_;
  Tensor image_;       // where in it the elements are
  size_t offset_ = 0;  // of the first element in a piece
  int64_t pieces_ = 1;
  size_t piece_bytes_ = 0;
  size_t piece_step_ = 0;  // from one to the next in memory
  bool has_original_ = true;
  Tensor view_;
};

struct RunOptions {
  std::string implementation;
  Layout layout = Layout::contiguous;
  unsigned char poison = 0xcd;
  bool captured = false;  // on a device: the call is captured, and its graph run
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

// A case in memory on a context, which must outlive it. `tensors` by slot.
class PlacedCase {
 public:
  // Contract violations throw.
  PlacedCase(const CaseInputs& inputs, const std::vector<Tensor>& tensors, Context& context,
             const RunOptions& options);
  // Why it cannot run; then nothing below may be called.
  [[nodiscard]] const std::string& refusal() const { return refusal_; }
  // Runs it once; `result` waits.
  void start();
  // The same, and waits.
  void run();
  // Runs it `times` more on a device, each time with the memory as it was before the first run; how
  // many bytes of outputs and their surroundings differ from what the first left, in 16-byte
  // pieces.
  int64_t count_differing_repeats(int times);
  [[nodiscard]] RunResult result() const;

 private:
  void place(size_t slot, const Tensor& like);
  [[nodiscard]] bool lies_apart() const;
  void allocate();
  void upload();
  // The images of all placed tensors.
  [[nodiscard]] std::vector<std::byte> download() const;
  void choose_homes();
  void borrow_workspace();

  const CaseInputs& inputs_;
  const std::vector<Tensor>& tensors_;
  Context& context_;
  RunOptions options_;
  DynamicCall call_;
  std::string refusal_;
  std::vector<Tensor> made_;
  std::vector<int> home_;  // which input's memory an output lives in, by slot; -1: its own
  bool aliased_ = false;
  std::vector<PlacedTensor> placed_;
  // One for all, since a device takes longer to allocate and to copy than most cases run; for
  // layouts that need it, one for each.
  std::vector<CaseMemory> memory_;
  std::vector<size_t> image_at_;  // of a placed tensor, in the images of all; ends with their bytes
  std::vector<int> at_;           // position in `placed_`, by slot
  std::vector<bool> is_written_;  // by that position
  CaseMemory workspace_;
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
