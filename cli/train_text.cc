#include "cli/train_text.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <span>

#include "ehc/engram/compress_ids.h"
#include "ehc/error.h"

namespace ehc::cli {

TrainText::TrainText(Context& context, const Tensor& raw_ids, const text::TokenMap& map,
                     int64_t max_ngram, int64_t classes, int64_t tokens, int64_t lanes)
    : lanes_(lanes), span_(tokens / lanes) {
  const int64_t size = raw_ids.shape[0];
  if (size <= tokens) {
    throw Error(
        ErrorKind::contract,
        fmt::format("text: expected more than the {} tokens of one step, got {}", tokens, size));
  }
  lane_tokens_ = (size - 1) / lanes / span_ * span_;  // the last token has no next one
  const auto i32 = [&](std::initializer_list<int64_t> shape) {
    return HostTensor(context, DType::i32, shape);
  };
  compressed_ = i32({size});
  ids_ = i32({tokens});
  history_ = i32({lanes, max_ngram - 1});
  cu_seqlens_ = i32({lanes + 1});
  classes_ = i32({tokens});
  const std::span<const int32_t> table = map.table();
  engram::compress_ids(context, {.ids = raw_ids,
                                 .table = Tensor(table.data(), DType::i32, {map.vocab_size()}),
                                 .compressed_ids = compressed_.tensor});
  count_classes(map.size(), classes);
}

void TrainText::count_classes(int64_t vocabulary, int64_t classes) {
  std::vector<int64_t> counts(static_cast<size_t>(vocabulary), 0);
  const auto* ids = compressed_.tensor.as<int32_t>();
  for (int64_t t = 0; t < size(); ++t) ++counts[static_cast<size_t>(ids[t])];
  std::vector<int32_t> by_frequency(counts.size());
  std::iota(by_frequency.begin(), by_frequency.end(), 0);
  std::stable_sort(by_frequency.begin(), by_frequency.end(), [&](int32_t a, int32_t b) {
    return counts[static_cast<size_t>(a)] > counts[static_cast<size_t>(b)];
  });
  std::vector<int64_t> class_counts(static_cast<size_t>(classes), 1);
  class_of_.resize(counts.size());
  for (size_t rank = 0; rank < by_frequency.size(); ++rank) {
    const auto id = static_cast<size_t>(by_frequency[rank]);
    const size_t its_class = std::min(rank, static_cast<size_t>(classes - 1));
    class_of_[id] = static_cast<int32_t>(its_class);
    class_counts[its_class] += counts[id];
  }
  for (const int64_t count : class_counts) {
    log_frequency_.push_back(
        std::log(static_cast<double>(count) / static_cast<double>(size() + classes)));
  }
}

void TrainText::copy_lane(int64_t lane, int64_t at, int64_t begin, int64_t count) {
  const auto* ids = compressed_.tensor.as<int32_t>();
  std::copy_n(ids + begin, count, ids_.tensor.as<int32_t>() + at);
  for (int64_t i = 0; i < count; ++i) {
    classes_.tensor.as<int32_t>()[at + i] = class_of_[static_cast<size_t>(ids[begin + i + 1])];
  }
  const int64_t before = history_.tensor.shape[1];
  for (int64_t k = 0; k < before; ++k) {
    const int64_t from = begin - before + k;
    history_.tensor.as<int32_t>()[lane * before + k] = from < 0 ? -1 : ids[from];
  }
  cu_seqlens_.tensor.as<int32_t>()[lane + 1] = static_cast<int32_t>(at + count);
}

void TrainText::set_views(int64_t lanes, int64_t tokens) {
  cu_seqlens_.tensor.as<int32_t>()[0] = 0;
  batch_ = {.ids = ids_.rows(tokens),
            .history = history_.rows(lanes),
            .cu_seqlens = cu_seqlens_.rows(lanes + 1),
            .classes = classes_.rows(tokens)};
}

const Batch& TrainText::batch_of(int64_t step) {
  for (int64_t lane = 0; lane < lanes_; ++lane) {
    copy_lane(lane, lane * span_, lane * lane_tokens_ + step * span_ % lane_tokens_, span_);
  }
  set_views(lanes_, lanes_ * span_);
  return batch_;
}

const Batch& TrainText::tokens_from(int64_t begin, int64_t count) {
  copy_lane(0, 0, begin, count);
  set_views(1, count);
  return batch_;
}

double TrainText::unigram_loss(const Batch& batch) const {
  const auto* classes = batch.classes.as<int32_t>();
  double sum = 0;
  for (int64_t t = 0; t < batch.classes.shape[0]; ++t) {
    sum -= log_frequency_[static_cast<size_t>(classes[t])];
  }
  return sum / static_cast<double>(batch.classes.shape[0]);
}

}  // namespace ehc::cli
