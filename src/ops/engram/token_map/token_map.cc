#include "ehc/engram/token_map.h"

#include <limits>

#include "core/registry.h"
#include "ops/engram/token_map/token_map_args.h"
#include "text/token_map.h"

namespace ehc::engram {

int32_t token_map_reference(const TokenMapArgs& args);

namespace {

using P = TokenMap;

constexpr auto kTable = table("engram.token_map", "1.1", "compressed id of every token id",
                              in<&P::texts>("texts", "U8[text_bytes]").packed(),
                              in<&P::text_offsets>("text_offsets", "I64[V+1]").packed(),
                              in<&P::raw_tokens>("raw_tokens", "U8[raw_bytes]").packed(),
                              in<&P::raw_offsets>("raw_offsets", "I64[V+1]").packed(),
                              out<&P::table>("table", "I32[V]"), out<&P::size>("size", "I32[1]"));

text::TokenStrings strings(const Tensor& bytes, const Tensor& offsets) {
  return {{bytes.as<const char>(), static_cast<size_t>(bytes.shape[0])},
          {offsets.as<const int64_t>(), static_cast<size_t>(offsets.shape[0])}};
}

TokenMapArgs make_args(const Call& call) {
  const P& p = *static_cast<const P*>(call.params);
  return {.texts = strings(p.texts, p.text_offsets),
          .raw_tokens = strings(p.raw_tokens, p.raw_offsets),
          .table = {p.table.as<int32_t>(), static_cast<size_t>(call.bound["V"])}};
}

void check_vocabulary(const Schema& schema, const Bound& b, const void* params) {
  const P& p = *static_cast<const P*>(params);
  if (p.texts.device != Device::cpu) return;
  if (b["V"] > std::numeric_limits<int32_t>::max()) {
    fail_tensor(schema, "table", "at most 2147483647 ids", std::to_string(b["V"]));
  }
  text::check_token_strings(strings(p.texts, p.text_offsets), "texts", "text_offsets");
  text::check_token_strings(strings(p.raw_tokens, p.raw_offsets), "raw_tokens", "raw_offsets");
}

template <auto Build>
void run(const Call& call) {
  const P& p = *static_cast<const P*>(call.params);
  p.size.as<int32_t>()[0] = Build(make_args(call));
}

int32_t build(const TokenMapArgs& a) { return text::map_tokens(a.texts, a.raw_tokens, a.table); }

constexpr Implementation kImplementations[] = {
    {"cpu", Device::cpu, nullptr, &run<&build>, nullptr},
    {"reference", Device::cpu, nullptr, &run<&token_map_reference>, nullptr},
};

constexpr Operator kTokenMap = [] {
  Operator op = make_operator<P>(kTable, kImplementations);
  op.rules = &check_vocabulary;
  return op;
}();

}  // namespace

EHC_DEFINE_CALLS(token_map, TokenMap, kTokenMap);
EHC_REGISTER(token_map, &kTokenMap);

}  // namespace ehc::engram
