#include "ehc/engram/compress_ids.h"

#include <algorithm>
#include <cstdint>

#include "core/device_call.h"
#include "core/parallel.h"
#include "core/registry.h"
#include "ops/engram/compress_ids/compress_ids_args.h"

namespace ehc::engram {

void compress_ids_reference(const CompressIdsArgs& args, int64_t begin, int64_t end);
void compress_ids_cuda(const CompressIdsArgs& args, int device, void* stream);

namespace {

using P = CompressIds;

constexpr auto kTable =
    table("engram.compress_ids", "1.1", "from token ids to compressed ids",
          in<&P::ids>("ids", "I32/I64[T]"), in<&P::table>("table", "I32[V]").packed(),
          attribute<&P::checked>("checked"), out<&P::compressed_ids>("compressed_ids", "I32[T]"));

template <class Id>
void check_range(const Schema& schema, const Tensor& tensor, int64_t tokens, int64_t vocab) {
  const auto* ids = tensor.as<const Id>();
  const auto legal = [&](int64_t id) { return id < vocab && id >= INT32_MIN; };
  int64_t largest = -1;
  int64_t smallest = -1;
  for (int64_t t = 0; t < tokens; ++t) {
    largest = std::max<int64_t>(largest, ids[t]);
    smallest = std::min<int64_t>(smallest, ids[t]);
  }
  if (legal(largest) && legal(smallest)) return;
  int64_t t = 0;
  while (legal(ids[t])) ++t;
  fail_tensor(schema, "ids",
              ids[t] < 0 ? "negative ids that fit I32" : "ids < V = " + std::to_string(vocab),
              std::to_string(ids[t]) + " at position " + std::to_string(t));
}

void check_ids(const Schema& schema, const Bound& b, const void* params) {
  const P& p = *static_cast<const P*>(params);
  if (!p.checked || p.ids.device != Device::cpu) return;
  if (p.ids.dtype == DType::i64) {
    check_range<int64_t>(schema, p.ids, b["T"], b["V"]);
  } else {
    check_range<int32_t>(schema, p.ids, b["T"], b["V"]);
  }
}

CompressIdsArgs make_args(const Call& call) {
  const P& p = *static_cast<const P*>(call.params);
  return {.ids = p.ids.data,
          .table = p.table.as<int32_t>(),
          .compressed = p.compressed_ids.as<int32_t>(),
          .tokens = call.bound["T"],
          .vocab = call.bound["V"],
          .ids_are_64 = p.ids.dtype == DType::i64};
}

void run_reference(const Call& call) {
  const CompressIdsArgs args = make_args(call);
  parallel_for(call.context, args.tokens, 16384,
               [&](int64_t begin, int64_t end) { compress_ids_reference(args, begin, end); });
}

constexpr Implementation kImplementations[] = {
#if EHC_HAS_CUDA
    {"cuda", Device::cuda, nullptr, &run_on_device<&make_args, &compress_ids_cuda>, nullptr},
#endif
    {"reference", Device::cpu, nullptr, &run_reference, nullptr},
};

constexpr Operator kCompressIds = [] {
  Operator op = make_operator<P>(kTable, kImplementations);
  op.rules = &check_ids;
  return op;
}();

}  // namespace

EHC_DEFINE_CALLS(compress_ids, CompressIds, kCompressIds);
EHC_REGISTER(compress_ids, &kCompressIds);

}  // namespace ehc::engram
