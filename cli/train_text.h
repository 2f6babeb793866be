// A text as training sees it: batches of a few lanes that read on through their parts of the text,
// and for every token the class of the next one.
#pragma once

#include <cstdint>
#include <vector>

#include "cli/host_tensor.h"
#include "ehc/context.h"
#include "ehc/tensor.h"
#include "ehc/text.h"

namespace ehc::cli {

// Tokens that one forward pass takes, lane behind lane. Views that live until the next batch.
struct Batch {
  Tensor ids;         // I32[T], compressed
  Tensor history;     // I32[lanes, Nmax-1], the ids before each lane, oldest first
  Tensor cu_seqlens;  // I32[lanes+1]
  Tensor classes;     // I32[T], class of the token that follows
};

class TrainText {
 public:
  // Class c < classes - 1 is the compressed id that is c-th in the order of frequency in the text
  // (of equal ones the smaller id first), the last class is all other ids.
  // Error{contract} for a text of no more than `tokens` ids. `tokens` is a multiple of `lanes`.
  TrainText(Context& context, const Tensor& raw_ids, const text::TokenMap& map, int64_t max_ngram,
            int64_t classes, int64_t tokens, int64_t lanes);

  // The batch of a step, counted from 0. A lane that comes to its end starts again.
  const Batch& batch_of(int64_t step);
  // Tokens [begin, begin + count) as one lane. Precondition: they and the one behind them exist,
  // and count <= tokens.
  const Batch& tokens_from(int64_t begin, int64_t count);

  [[nodiscard]] int64_t size() const { return compressed_.tensor.shape[0]; }
  // Steps after which every lane has read its part once.
  [[nodiscard]] int64_t steps_per_pass() const { return lane_tokens_ / span_; }
  // Natural logarithms of the frequencies of the classes, each counted once too often, so that
  // none is infinite.
  [[nodiscard]] const std::vector<double>& log_frequency() const { return log_frequency_; }
  // Mean loss over a batch when these frequencies are all that is known.
  [[nodiscard]] double unigram_loss(const Batch& batch) const;

 private:
  void count_classes(int64_t vocabulary, int64_t classes);
  void copy_lane(int64_t lane, int64_t at, int64_t begin, int64_t count);
  void set_views(int64_t lanes, int64_t tokens);

  int64_t lanes_, span_, lane_tokens_ = 0;
  HostTensor compressed_;  // I32[N], the whole text
  HostTensor ids_, history_, cu_seqlens_, classes_;
  std::vector<int32_t> class_of_;  // by compressed id
  std::vector<double> log_frequency_;
  Batch batch_;
};

}  // namespace ehc::cli
