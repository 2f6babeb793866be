#include "cli/case_inputs.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>

#include "cli/case_random.h"
#include "cli/integers.h"
#include "core/float_formats.h"
#include "core/linear.h"
#include "core/parallel.h"
#include "ehc/error.h"

namespace ehc::cli {

namespace {

std::optional<int64_t> parse_integer(std::string_view text) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

std::optional<Symbol> find_symbol(std::string_view name) {
  for (int i = 0; i < kSymbolCount; ++i) {
    if (kSymbols[i].name == name) return static_cast<Symbol>(i);
  }
  return std::nullopt;
}

// First name of "BF16/F16/F32"; A and W stand for bf16.
DType first_type(const TensorSpec& spec) {
  std::string_view types = spec.pattern.substr(0, spec.pattern.find('['));
  if (types.starts_with("X:")) types = types.substr(2);
  return dtype_from_name(types.substr(0, types.find('/'))).value_or(DType::bf16);
}

bool is_integer(DType type) {
  return type == DType::i64 || type == DType::i32 || type == DType::u8 || type == DType::boolean;
}

bool is_token_axis(const Expression& e) { return e.is_symbol() && e.steps[0].value == symbol("T"); }

void store_integer(const Tensor& t, int64_t at, int64_t value) {
  if (t.dtype == DType::i64) {
    t.as<int64_t>()[at] = value;
  } else if (t.dtype == DType::i32) {
    t.as<int32_t>()[at] = static_cast<int32_t>(value);
  } else {
    t.as<uint8_t>()[at] = static_cast<uint8_t>(value);
  }
}

// Runs `body(begin, end)` over the elements of large tensors on all cores.
template <class Body>
void for_elements(int64_t count, const Body& body) {
  static Context context = Context::cpu();
  parallel_for(context, count, 1 << 16, body);
}

}  // namespace

bool is_case_word(std::string_view key) {
  constexpr std::string_view kWords[] = {"with",     "mask",   "index",   "memory",  "fill",
                                         "data",     "level",  "compare", "measure", "slack",
                                         "resident", "device", "tokens"};
  return std::find(std::begin(kWords), std::end(kWords), key) != std::end(kWords);
}

int64_t CaseInputs::value_of(const Expression& e) const {
  const Linear v = evaluate(e, values_);
  return v.solvable && v.unknown < 0 ? v.value : -1;
}

CaseInputs::CaseInputs(const Operator& op, const CaseLine& line, CaseValues values)
    : op_(op), line_(line), case_values_(values) {
  const size_t count = op.schema.tensors.size();
  present_.resize(count);
  dtypes_.resize(count, DType::none);
  read_settings();
  choose_inputs();
  relate_symbols();
  number_slots();
  for (size_t i = 0; i < slots_.size(); ++i) {
    if (present_[slots_[i].position]) make_tensor(i);
  }
  for (size_t i = 0; i < slots_.size(); ++i) {
    const Tensor& t = tensors_[i];
    if (t.present() && (has_all_values() || is_integer(t.dtype))) fill(i);
  }
  if (has_all_values()) hide_masked_rows();
}

void CaseInputs::fail_case(const std::string& what) const {
  throw Error(ErrorKind::contract, "case '" + line_.text() + "': " + what);
}

// Every key is a reserved word, a dtype class, a symbol, an attribute, a tensor or a range.
void CaseInputs::read_settings() {
  const Schema& schema = op_.schema;
  for (const auto& [key, value] : line_.settings) {
    if (is_case_word(key)) continue;
    bool known = false;
    if (schema.attribute_index(key) >= 0) {
      attributes_.emplace_back(key, value);
      known = true;
    }
    if (const auto s = find_symbol(key)) {
      known = true;
      int64_t product = 1;
      std::vector<int64_t> dims;
      for (size_t at = 0; at <= value.size();) {
        const size_t end = std::min(value.find('x', at), value.size());
        const auto dim = parse_integer(std::string_view(value).substr(at, end - at));
        const bool fits = dim && *dim >= 0 && !__builtin_mul_overflow(product, *dim, &product);
        if (!fits || (end < value.size() && key != "T")) {
          fail_case(key + ": expected an integer >= 0, got '" + value + "'");
        }
        dims.push_back(*dim);
        at = end + 1;
      }
      values_.set(*s, product);
      if (key == "T") lead_ = dims;
    }
    const bool is_range = key.starts_with("range.");
    if (is_range || key == "A" || key == "W") known = true;
    const auto type = dtype_from_name(value);
    for (size_t i = 0; i < schema.tensors.size(); ++i) {
      const TensorSpec& spec = schema.tensors[i];
      const std::string_view types = spec.pattern.substr(0, spec.pattern.find('['));
      if (spec.is_output || (spec.name != key && types != key)) continue;
      if (!type || !contains(spec.dtypes, *type)) {
        fail_case(key + ": expected a dtype of '" + std::string(spec.pattern) + "', got '" + value +
                  "'");
      }
      dtypes_[i] = *type;
      known = true;
    }
    if (!known) {
      fail_case("'" + key + "': expected a symbol, an attribute, a tensor or a word of cases.md");
    }
  }
}

// Required inputs, those named by `with` and what their groups bring along.
void CaseInputs::choose_inputs() {
  const Schema& schema = op_.schema;
  std::vector<bool> wanted(present_.size());
  const std::string with = line_.get("with");
  for (std::string_view rest = with; !rest.empty();) {
    const size_t comma = rest.find(',');
    const int index = schema.tensor_index(rest.substr(0, comma), false);
    if (index < 0 || !schema.tensors[static_cast<size_t>(index)].is_optional) {
      fail_case("with: expected optional inputs, got '" + std::string(rest.substr(0, comma)) + "'");
    }
    wanted[static_cast<size_t>(index)] = true;
    rest = comma == std::string_view::npos ? std::string_view{} : rest.substr(comma + 1);
  }
  for (size_t i = 0; i < present_.size(); ++i) {
    const TensorSpec& spec = schema.tensors[i];
    present_[i] = !spec.is_output && (!spec.is_optional || wanted[i]);
  }
  for (const GroupSpec& group : schema.groups) {
    if (schema.tensors[group.first[0]].is_output) continue;
    const auto any = [&](const auto& list, uint8_t size) {
      return std::any_of(list.begin(), list.begin() + size, [&](uint8_t i) { return wanted[i]; });
    };
    const bool second = any(group.second, group.second_count);
    const bool first =
        group.kind == GroupSpec::one_of ? !second : any(group.first, group.first_count);
    for (uint8_t i = 0; i < group.first_count; ++i) present_[group.first[i]] = first;
    for (uint8_t i = 0; i < group.second_count; ++i) present_[group.second[i]] = second;
  }
}

// Symbols that follow from attributes, absent tensors and the relations of the contract.
void CaseInputs::relate_symbols() {
  DynamicCall call(op_);
  set_attributes(call);
  const Schema& schema = op_.schema;
  for (size_t i = 0; i < schema.attributes.size(); ++i) {
    const AttributeSpec& a = schema.attributes[i];
    if (!a.binds.is_symbol() || a.type != AttributeType::integer) continue;
    const AttributeValue v = call.attribute(i);
    if (v.present && v.integer >= 0 && !values_.has(a.binds.steps[0].value)) {
      values_.set(a.binds.steps[0].value, v.integer);
    }
  }
  for (const SymbolDefault& s : schema.defaults) {
    if (!present_[s.tensor_index] && !values_.has(s.index)) values_.set(s.index, s.value);
  }
  for (const Relation& r : kRelations) {
    const int64_t value = value_of(r.expression);
    if (value >= 0 && !values_.has(r.result)) values_.set(r.result, value);
  }
}

// A list that is absent has no slots, one of outputs as many as its length says.
void CaseInputs::number_slots() {
  for (size_t i = 0; i < op_.schema.tensors.size(); ++i) {
    const TensorSpec& spec = op_.schema.tensors[i];
    int64_t count = 1;
    if (spec.is_list) {
      count = spec.is_output || present_[i] ? value_of(spec.length) : 0;
      if (count < 0) fail_case("'" + std::string(spec.name) + "': its length has no value");
    }
    for (int64_t e = 0; e < count; ++e) slots_.push_back({i, static_cast<size_t>(e)});
  }
  tensors_.resize(slots_.size());
}

void CaseInputs::make_tensor(size_t slot) {
  const TensorSpec& spec = spec_of(slot);
  const DType chosen = dtypes_[slots_[slot].position];
  const DType type = chosen != DType::none ? chosen : first_type(spec);
  int64_t shape[kMaxRank] = {};
  int rank = 0;
  double elements = 1;
  for (uint8_t k = 0; k < spec.shape.rank; ++k) {
    const Expression& e = spec.shape.dims[k];
    if (e.optional_axis && value_of(e) < 0) continue;
    if (k == 0 && op_.schema.flattens && is_token_axis(e) && lead_.size() > 1) {
      if (lead_.size() + spec.shape.rank - 1 > kMaxRank) fail_case("T: too many dimensions");
      for (const int64_t dim : lead_) shape[rank++] = dim;
      elements *= static_cast<double>(tokens());
      continue;
    }
    const int64_t dim = value_of(e);
    if (dim < 0) {
      fail_case("tensor '" + std::string(spec.name) + "' " + std::string(spec.pattern) +
                ": a symbol has no value, or the dimension is no integer >= 0");
    }
    elements *= static_cast<double>(dim);
    shape[rank++] = dim;
  }
  if (elements * static_cast<double>(size_of(type)) > 0x1p46) {
    fail_case("tensor '" + std::string(spec.name) + "': larger than 64 TiB");
  }
  Tensor& t = tensors_[slot];
  t = Tensor(nullptr, type, shape, rank);
  const size_t bytes = static_cast<size_t>(t.numel()) * size_of(type);
  if (has_all_values() || is_integer(type)) {
    t.data = memory_.emplace_back(Context::cpu(1), bytes).data();
  } else {
    t.data = addresses_.emplace_back(bytes).data();
  }
}

void CaseInputs::set_attributes(DynamicCall& call) const {
  for (const auto& [name, text] : attributes_) call.set_attribute_text(name, text);
}

void CaseInputs::prepare(DynamicCall& call) const {
  set_attributes(call);
  for (const Slot& slot : slots_) {
    if (op_.schema.tensors[slot.position].is_list) {
      call.set_list_length(slot.position, slot.element + 1);
    }
  }
}

void CaseInputs::bind(DynamicCall& call) const {
  prepare(call);
  for (size_t i = 0; i < tensors_.size(); ++i) {
    if (!call.spec_of(i).is_output) call.tensor(i) = tensors_[i];
  }
}

void CaseInputs::fill(size_t slot) {
  const std::string seed_text = line_.get("data", "1");
  const auto seed = parse_integer(seed_text);
  if (!seed) fail_case("data: expected an integer, got '" + seed_text + "'");
  const uint64_t stream = random_stream(static_cast<uint64_t>(*seed), name_of(slot));
  if (is_integer(tensors_[slot].dtype)) {
    fill_integers(slot, stream);
  } else {
    fill_floats(slot, stream);
  }
}

namespace {

struct Range {
  int64_t least = 0;
  int64_t most = 0;
};

// Ascending offsets 0 = o_0 <= ... <= o_count = total; with three parts or more one is empty.
void fill_boundaries(const Tensor& t, int64_t total, uint64_t seed) {
  const int64_t parts = t.numel() - 1;
  std::vector<int64_t> cuts(static_cast<size_t>(parts) + 1, 0);
  for (int64_t i = 1; i < parts; ++i) {
    cuts[static_cast<size_t>(i)] = random_integer(seed, i, 0, total);
  }
  cuts.back() = parts > 0 ? total : 0;
  std::sort(cuts.begin(), cuts.end());
  if (parts >= 3) cuts[2] = cuts[1];
  for (int64_t i = 0; i <= parts; ++i) store_integer(t, i, cuts[static_cast<size_t>(i)]);
}

// Exclusive prefix sums of each layer's sizes.
void fill_offsets(const Tensor& offsets, const Tensor& sizes) {
  const int64_t columns = offsets.shape[1];
  for (int64_t l = 0; l < offsets.shape[0]; ++l) {
    int64_t sum = 0;
    for (int64_t c = 0; c < columns; ++c) {
      store_integer(offsets, l * columns + c, sum);
      sum += integer_at(sizes, l * columns + c);
    }
  }
}

void fill_text(const Tensor& t, uint64_t seed) {
  constexpr std::string_view kLetters = " aAbBcCdDeEzZ09 .,-";
  for (int64_t i = 0; i < t.numel(); ++i) {
    store_integer(t, i, kLetters[random_bits(seed, i) % kLetters.size()]);
  }
}

}  // namespace

// Meaning by the tensor's name; anything else is uniform in [0, 100].
void CaseInputs::fill_integers(size_t slot, uint64_t seed) {
  const Tensor& t = tensors_[slot];
  const std::string name(spec_of(slot).name);
  const int64_t count = t.numel();
  const bool extreme = line_.get("fill") == "extreme";
  if (name == "cu_seqlens") return fill_boundaries(t, tokens(), seed);
  if (name == "text_offsets") return fill_boundaries(t, value_of(symbol("text_bytes")), seed);
  if (name == "raw_offsets") return fill_boundaries(t, value_of(symbol("raw_bytes")), seed);
  if (name == "texts" || name == "raw_tokens") return fill_text(t, seed);
  if (const Tensor* sizes = input("vocab_sizes"); name == "offsets" && sizes != nullptr) {
    return fill_offsets(t, *sizes);
  }
  if (name == "image_token_mask") {
    const std::string pattern = line_.get("mask", "alternating");
    if (pattern != "none" && pattern != "all" && pattern != "alternating" && pattern != "random" &&
        pattern != "first" && pattern != "last") {
      fail_case("mask: expected none, all, alternating, random, first or last, got '" + pattern +
                "'");
    }
    for (int64_t i = 0; i < count; ++i) {
      const bool masked = pattern == "all" || (pattern == "alternating" && i % 2 == 1) ||
                          (pattern == "random" && random_bits(seed, i) % 3 == 0) ||
                          (pattern == "first" && i == 0) || (pattern == "last" && i == count - 1);
      store_integer(t, i, masked ? 1 : 0);
    }
    return;
  }

  const int64_t rows = value_of(symbol("rows"));
  const int64_t vocabulary = value_of(symbol("V"));
  Range range{0, 100};
  if (name == "indices") range = {-1, rows - 1};
  if (name == "ids") range = {-1, values_.has(symbol("V")) ? vocabulary - 1 : 129279};
  if (name == "window") range = {0, 129279};
  if (name == "history") range = {-1, 129279};
  if (name == "table") range = {0, std::max<int64_t>(0, vocabulary - 1)};
  if (name == "vocab_sizes") range = {1, 1000000};
  if (name == "multipliers") range = {1, int64_t{1} << 46};
  if (name == "weight") range = {0, 255};
  if (name == "scale") range = {110, 140};
  if (extreme) {
    if (name == "window") range = {INT32_MIN, INT32_MAX};
    if (name == "ids") range.least = INT32_MIN;
    if (name == "multipliers") range = {INT64_MIN, INT64_MAX};
    if (name == "scale") range = {0, 255};
    if (name == "vocab_sizes") range = {1, INT32_MAX / std::max<int64_t>(1, value_of(symbol("C")))};
  }
  const std::string text = line_.get("range." + name);
  if (!text.empty()) {
    const size_t colon = text.find(':');
    const auto least = parse_integer(std::string_view(text).substr(0, colon));
    const auto most = colon == std::string::npos
                          ? least
                          : parse_integer(std::string_view(text).substr(colon + 1));
    if (!least || !most || *least > *most) {
      fail_case("range." + name + ": expected least:most, got '" + text + "'");
    }
    range = {*least, *most};
  }
  const std::string pattern = name == "indices" ? line_.get("index", "random") : "random";
  if (pattern != "random" && pattern != "none" && pattern != "same" && pattern != "ascending") {
    fail_case("index: expected random, none, same or ascending, got '" + pattern + "'");
  }
  for_elements(count, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      int64_t value = random_integer(seed, i, range.least, range.most);
      if (name == "indices" && random_bits(seed + 1, i) % 8 == 0) value = -1;
      if (name == "multipliers") value |= 1;
      if (pattern == "none") value = -1;
      if (pattern == "same") value = rows - 1;
      if (pattern == "ascending") value = rows > 0 ? i % rows : -1;
      store_integer(t, i, value);
    }
  });
}

namespace {

// What a tensor of this name usually holds, as scale * x + shift of a standard normal x; positive
// quantities take its absolute value.
struct Law {
  float scale = 1;
  float shift = 0;
  bool positive = false;
};

}  // namespace

void CaseInputs::fill_floats(size_t slot, uint64_t seed) {
  const Tensor& t = tensors_[slot];
  const TensorSpec& spec = spec_of(slot);
  const std::string_view name = spec.is_list ? spec.name.substr(0, spec.name.find('.')) : spec.name;
  const std::string kind = line_.get("fill", "normal");
  if (kind != "normal" && kind != "extreme" && kind != "zero" && kind != "nan" && kind != "inf") {
    fail_case("fill: expected normal, extreme, zero, nan or inf, got '" + kind + "'");
  }
  if (size_of(t.dtype) == 1) {  // formats of rows: any byte, or exponents near 1
    const bool scale = t.dtype == DType::f8_e8m0;
    const bool whole = kind == "extreme" || kind == "nan";
    for (int64_t i = 0; i < t.numel(); ++i) {
      auto byte = static_cast<uint8_t>(random_bits(seed, i));
      if (scale && !whole) byte = static_cast<uint8_t>(110 + byte % 30);
      if (!scale && !whole && (byte & 0x7fU) == 0x7fU) byte = 0x3c;
      t.as<uint8_t>()[i] = byte;
    }
    return;
  }
  const int64_t width = t.rank > 0 ? std::max<int64_t>(1, t.shape[t.rank - 1]) : 1;
  Law law;
  if (name == "fn") {  // so that mixes, sums over a row of it, are of order 1
    law.scale = 1 / std::sqrt(static_cast<float>(width));
  } else if (name.ends_with("norm_weight") || name == "weight_hidden" || name == "weight_embed") {
    law = {0.25F, 1, false};
  } else if (name == "weight" && value_of(symbol("E")) > 0) {
    law = {1 / std::sqrt(static_cast<float>(value_of(symbol("E")))), 0, false};
  } else if (name == "post" || name == "pre" || name == "comb" || name == "row_scale" ||
             name == "col_scale" || name == "col_partial" || name.starts_with("rstd")) {
    law = {0.5F, 0.25F, true};
  } else if (name.starts_with("sqr") || name.ends_with("sqr")) {  // sums over a token's streams
    const auto columns =
        static_cast<float>(std::max<int64_t>(1, value_of(symbol("n")) * value_of(symbol("d"))));
    law = {0.5F * columns, 0.25F * columns, true};
  }
  const bool by_token = spec.shape.rank > 0 && is_token_axis(spec.shape.dims[0]);
  const bool half = t.dtype == DType::f16;
  for_elements(t.numel(), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const uint64_t bits = random_bits(seed, i);
      float x = random_normal(bits);
      if (law.positive) x = std::fabs(x);
      x = x * law.scale + law.shift;
      const uint64_t dice = random_bits(seed + 1, kind == "normal" ? 0 : i);
      if (kind == "extreme" && by_token) {
        // Rows of very different size, zeros of both signs, subnormal elements.
        const auto power = static_cast<int>(random_bits(seed + 2, i / width) % (half ? 12 : 40));
        x = std::ldexp(x, power - (half ? 8 : 20));
        if (dice % 16 == 0) x = std::copysign(0.0F, x);
        if (dice % 16 == 1) x = std::ldexp(x, half ? -10 : -110);
      }
      if (kind == "zero") x = (dice & 1U) != 0 ? 0.0F : -0.0F;
      if (kind == "nan" && by_token && dice % 64 == 0) x = std::numeric_limits<float>::quiet_NaN();
      if (kind == "inf" && by_token && dice % 64 == 0) {
        x = std::copysign(std::numeric_limits<float>::infinity(), x);
      }
      store_float(t.data, t.dtype, i, x);
    }
  });
}

// The contract: rows of masked tokens are never read. NaN there shows whoever does.
void CaseInputs::hide_masked_rows() {
  const Tensor* mask = input("image_token_mask");
  if (mask == nullptr) return;
  for (const std::string_view name : {"kv", "key", "value", "gated_value"}) {
    const Tensor* t = input(name);
    if (t == nullptr) continue;
    const int64_t row = tokens() > 0 ? t->numel() / tokens() : 0;
    for (int64_t i = 0; i < tokens() * row; ++i) {
      if (mask->as<uint8_t>()[i / row] == 0) continue;
      store_float(t->data, t->dtype, i, std::numeric_limits<float>::quiet_NaN());
    }
  }
}

const Tensor* CaseInputs::input(std::string_view name) const {
  for (size_t i = 0; i < slots_.size(); ++i) {
    const TensorSpec& spec = spec_of(i);
    if (!spec.is_output && spec.name == name && tensors_[i].present()) return &tensors_[i];
  }
  return nullptr;
}

}  // namespace ehc::cli
