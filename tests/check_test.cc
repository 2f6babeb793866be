// The case files, the inputs made from them, and whether `ehc check` finds what it looks for.
#include "cli/check.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <set>

#include "cli/bench.h"
#include "cli/cost.h"
#include "cli/selection.h"
#include "core/float_formats.h"
#include "core/forced_grid.h"
#include "core/parallel.h"
#include "core/registry.h"
#include "ehc/error.h"
#include "tests/core/toy_operator.h"

namespace ehc::cli {
namespace {

std::string message_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& e) {
    return e.what();
  }
  return "accepted";
}

std::vector<std::string> texts(std::string_view source) {
  std::vector<std::string> out;
  for (const CaseLine& line : parse_cases(source, "file")) out.push_back(line.text());
  return out;
}

// --- lines ---------------------------------------------------------------------------------------

TEST(CaseLines, DefaultsAlternativesAndComments) {
  EXPECT_THAT(texts("# nothing\n\n  op a=1   b=2 # more\r\n"), testing::ElementsAre("op a=1 b=2"));
  EXPECT_THAT(texts("op a=1|2 b=x|y"),
              testing::ElementsAre("op a=1 b=x", "op a=1 b=y", "op a=2 b=x", "op a=2 b=y"));
  EXPECT_THAT(texts("defaults op a=1 b=2\nop b=3\nother c=4\ndefaults op a=9\nop"),
              testing::ElementsAre("op a=1 b=3", "other c=4", "op a=9 b=2"));
  EXPECT_EQ(parse_cases("op level=2", "file")[0].level, 2);
}

TEST(CaseLines, TheTextOfALineParsesToItself) {
  for (const std::string& text : texts("defaults op a=1|2 with=x,y\nop T=3x5 fill=nan|zero")) {
    EXPECT_THAT(texts(text), testing::ElementsAre(text));
  }
}

TEST(CaseLines, MalformedLinesNameTheirPlace) {
  const auto error = [](std::string_view text) {
    return message_of([&] { parse_cases(text, "file"); });
  };
  EXPECT_EQ(error("op a=1\nop b"), "file:2: expected key=value, got 'b'");
  EXPECT_EQ(error("op ="), "file:1: expected key=value, got '='");
  EXPECT_EQ(error("op a="), "file:1: expected key=value, got 'a='");
  EXPECT_EQ(error("a=1"), "file:1: expected an operator's name, got 'a=1'");
  EXPECT_EQ(error("defaults"), "file:1: expected an operator's name, got 'defaults'");
  EXPECT_EQ(error("op level=4"), "file:1: level: expected 1, 2 or 3, got '4'");
  EXPECT_THAT(message_of([] { read_case_file("/does/not/exist"); }),
              testing::HasSubstr("/does/not/exist"));
}

TEST(CaseLines, ListsNameAlternatives) {
  EXPECT_THAT(texts("list a=1|2\nop x=@a y=3"), testing::ElementsAre("op x=1 y=3", "op x=2 y=3"));
  EXPECT_EQ(message_of([] { parse_cases("op x=@a", "file"); }),
            "file:1: expected a list of this file, got '@a'");
  EXPECT_EQ(message_of([] { parse_cases("list a", "file"); }),
            "file:1: expected list name=alternatives");
}

TEST(CaseLines, ADeviceOfItsOwn) {
  EXPECT_EQ(parse_cases("op", "file")[0].device, "any");
  const CaseLine line = parse_cases("op device=cuda", "file")[0];
  EXPECT_TRUE(takes_part(line, {.device = Device::cuda}));
  EXPECT_FALSE(takes_part(line, {.device = Device::cpu}));
  EXPECT_EQ(message_of([] { parse_cases("op device=tpu", "file"); }),
            "file:1: device: expected cpu, cuda or any, got 'tpu'");
}

TEST(CaseLines, PairwiseHasEveryPairOnce) {
  const auto lines = parse_cases("pairwise op a=1|2|3|4 b=1|2|3 c=x|y|z d=0|1 e=only", "file");
  std::set<std::string> pairs;
  for (const CaseLine& line : lines) {
    EXPECT_EQ(line.get("e"), "only");
    for (const char* one : {"a", "b", "c", "d"}) {
      for (const char* other : {"a", "b", "c", "d"}) {
        pairs.insert(one + line.get(one) + other + line.get(other));
      }
    }
  }
  // Ordered pairs of two keys, and every key with itself.
  EXPECT_EQ(pairs.size(), 2U * (12 + 12 + 8 + 9 + 6 + 6) + 4 + 3 + 3 + 2);
  EXPECT_LE(lines.size(), 16U) << "of 72 products; 12 are the least";
  EXPECT_THAT(texts("pairwise op a=1|2"), testing::ElementsAre("op a=1", "op a=2"));
}

TEST(CaseLines, PairwiseKeepsAProductBelowALimit) {
  std::set<std::string> pairs;
  for (const CaseLine& line :
       parse_cases("pairwise op a=1|10|100 b=1|20|300 c=x|y most=a*b:300", "file")) {
    const int64_t a = std::stoll(line.get("a"));
    const int64_t b = std::stoll(line.get("b"));
    EXPECT_LE(a * b, 300);
    EXPECT_EQ(line.get("most"), "");
    pairs.insert(line.get("a") + "*" + line.get("b"));
  }
  EXPECT_THAT(pairs, testing::ElementsAre("1*1", "1*20", "1*300", "10*1", "10*20", "100*1"));
}

TEST(CaseFiles, EveryOperatorIsCheckedAndEveryLineHasAnOperator) {
  std::set<std::string> checked;
  for (const CaseLine& line : load_cases(check_case_texts(), {})) {
    EXPECT_NE(find_operator(line.op), nullptr) << line.text();
    if (line.level == 1 && line.device == "any") checked.insert(line.op);
  }
  for (const Operator* op : all_operators()) {
    EXPECT_EQ(checked.count(std::string(op->schema.name)), 1U)
        << op->schema.name << " has no case of level 1 in tests/cases";
  }
  for (const CaseLine& line : load_cases(bench_case_texts(), {})) {
    EXPECT_NE(find_operator(line.op), nullptr) << line.text();
  }
}

TEST(CaseFiles, NoOperatorUsesAWordOfTheCases) {
  for (const Operator* op : all_operators()) {
    for (const TensorSpec& s : op->schema.tensors) EXPECT_FALSE(is_case_word(s.name)) << s.name;
    for (const AttributeSpec& a : op->schema.attributes) {
      EXPECT_FALSE(is_case_word(a.name)) << a.name;
    }
  }
}

TEST(CaseList, AKeyComesOnceInALine) {
  EXPECT_EQ(message_of([] { parse_cases("op a=1\nop b=2 a=1 b=2", "file"); }),
            "file:2: expected every key once, got 'b' twice");
  EXPECT_EQ(message_of([] { parse_cases("defaults op a=1 a=2", "file"); }),
            "file:1: expected every key once, got 'a' twice");
  EXPECT_EQ(parse_cases("defaults op a=1\nop a=2", "file")[0].get("a"), "2") << "a later line";
}

// --- inputs --------------------------------------------------------------------------------------

CaseInputs toy_inputs(const std::string& settings) {
  const std::string text = "defaults toy eps=1 A=F32\ntoy " + settings;
  return {toy::kOperator, parse_cases(text, "file").front()};
}

std::string shape_of(const CaseInputs& inputs, std::string_view name) {
  return describe(
      inputs.tensors()[static_cast<size_t>(inputs.op().schema.tensor_index(name, false))]);
}

TEST(CaseInputs, FollowTheTable) {
  const CaseInputs plain = toy_inputs("T=3 n=2 d=5");
  EXPECT_EQ(shape_of(plain, "x"), "F32[3,2,5]");
  EXPECT_EQ(shape_of(plain, "both"), "F32[3,3,5]");
  EXPECT_EQ(shape_of(plain, "left"), "none");
  EXPECT_EQ(shape_of(plain, "table"), "none");
  const CaseInputs apart = toy_inputs("T=2x3 n=2 d=5 with=left,first A=BF16");
  EXPECT_EQ(shape_of(apart, "x"), "BF16[2,3,2,5]");
  EXPECT_EQ(shape_of(apart, "both"), "none");
  EXPECT_EQ(shape_of(apart, "right"), "BF16[2,3,5]") << "the group's other half";
  EXPECT_EQ(shape_of(apart, "second"), "F32[2]");
  EXPECT_EQ(apart.tokens(), 6);
  const CaseInputs wide =
      toy_inputs("T=3 n=2 d=5 with=state,table table=I64 B=2 w=4 dilation=3 L=2 Nmax=3 Kh=4");
  EXPECT_EQ(shape_of(wide, "state"), "F32[2,9,2,5]");
  EXPECT_EQ(shape_of(wide, "table"), "I64[2,8]") << "C follows from Nmax and Kh";
}

TEST(CaseInputs, SayWhatIsWrong) {
  const auto error = [](const std::string& settings) {
    return message_of([&] { toy_inputs(settings); });
  };
  EXPECT_THAT(error("T=3 n=2"), testing::HasSubstr("tensor 'x' A[T,n,d]: a symbol has no value"));
  EXPECT_THAT(error("T=3 n=2 d=4 speed=3"),
              testing::HasSubstr("'speed': expected a symbol, an attribute, a tensor or a word"));
  EXPECT_THAT(error("T=-1 n=2 d=4"), testing::HasSubstr("T: expected an integer >= 0, got '-1'"));
  EXPECT_THAT(error("T=3 n=2x2 d=4"), testing::HasSubstr("n: expected an integer >= 0"));
  EXPECT_THAT(error("T=3 n=2 d=4 x=I32"),
              testing::HasSubstr("x: expected a dtype of 'A[T,n,d]', got 'I32'"));
  EXPECT_THAT(error("T=3 n=2 d=4 with=x"),
              testing::HasSubstr("with: expected optional inputs, got 'x'"));
  EXPECT_THAT(error("T=3 n=2 d=4 fill=red"), testing::HasSubstr("fill: expected normal"));
  EXPECT_THAT(error("T=3 n=2 d=4 data=x"), testing::HasSubstr("data: expected an integer"));
  EXPECT_THAT(error("T=99999999999 n=8 d=99999999999"), testing::HasSubstr("larger than 64 TiB"));
}

TEST(CaseInputs, AreTheSameForTheSameNumberOnly) {
  const auto first = [](const std::string& settings) {
    const CaseInputs inputs = toy_inputs("T=3 n=2 d=5 " + settings);
    const float* x = inputs.tensors()[0].as<float>();
    return std::vector<float>(x, x + 30);
  };
  EXPECT_EQ(first(""), first("data=1"));
  EXPECT_NE(first(""), first("data=2"));
}

TEST(CaseInputs, NormalNumbersHaveMeanZeroAndVarianceOne) {
  const CaseInputs inputs = toy_inputs("T=10000 n=2 d=5");
  double sum = 0;
  double squares = 0;
  for (int i = 0; i < 100000; ++i) {
    const double x = inputs.tensors()[0].as<float>()[i];
    sum += x;
    squares += x * x;
  }
  EXPECT_NEAR(sum / 1e5, 0, 0.02);
  EXPECT_NEAR(squares / 1e5, 1, 0.02);
}

TEST(CaseInputs, FillsHoldWhatTheyPromise) {
  const auto count = [](const std::string& fill, const auto& test) {
    const CaseInputs inputs = toy_inputs("T=100 n=2 d=8 fill=" + fill);
    int hits = 0;
    for (int i = 0; i < 1600; ++i) hits += test(inputs.tensors()[0].as<float>()[i]) ? 1 : 0;
    return hits;
  };
  const auto is_nan = [](float x) { return std::isnan(x); };
  const auto is_inf = [](float x) { return std::isinf(x); };
  EXPECT_EQ(count("normal", is_nan), 0);
  EXPECT_GT(count("nan", is_nan), 5);
  EXPECT_LT(count("nan", is_nan), 200);
  EXPECT_GT(count("inf", is_inf), 5);
  EXPECT_EQ(count("zero", [](float x) { return x == 0; }), 1600);
  EXPECT_GT(count("extreme", [](float x) { return std::fabs(x) > 1e4F; }), 50);
  EXPECT_GT(count("extreme", [](float x) { return x != 0 && std::fabs(x) < 1e-30F; }), 10);
}

// Integer inputs by name, on the real operators.
TEST(CaseInputs, IntegersStayInTheirRanges) {
  const Operator* hash = find_operator("engram.hash");
  ASSERT_NE(hash, nullptr);
  const CaseInputs inputs(
      *hash, parse_cases("engram.hash T=9 L=2 Nmax=3 Kh=4 with=image_token_mask mask=first", "file")
                 .front());
  const auto input = [&](std::string_view name) {
    return inputs.tensors()[static_cast<size_t>(hash->schema.tensor_index(name, false))];
  };
  const Tensor sizes = input("vocab_sizes");
  const Tensor offsets = input("offsets");
  for (int64_t l = 0; l < 2; ++l) {
    int64_t sum = 0;
    for (int64_t c = 0; c < 8; ++c) {
      EXPECT_EQ(offsets.as<int32_t>()[l * 8 + c], sum);
      EXPECT_GT(sizes.as<int32_t>()[l * 8 + c], 0);
      sum += sizes.as<int32_t>()[l * 8 + c];
    }
  }
  EXPECT_EQ(input("image_token_mask").as<uint8_t>()[0], 1);
  EXPECT_EQ(input("image_token_mask").as<uint8_t>()[1], 0);
  for (int i = 0; i < 6; ++i) EXPECT_EQ(input("multipliers").as<int64_t>()[i] % 2, 1);
}

// --- layouts -------------------------------------------------------------------------------------

// A tensor alone in memory of its own.
struct Placed {
  Placed(const Tensor& like, Layout layout, bool packed, int lead_rank)
      : tensor(like, layout, packed, lead_rank, 0xcd), memory(Context::cpu(1), tensor.bytes()) {
    tensor.set_memory(Context::cpu(1), memory.data());
    tensor.for_each_piece([&](size_t at, size_t from, size_t bytes) {
      std::memcpy(bytes_at(at), tensor.original().data() + from, bytes);
    });
  }
  [[nodiscard]] const Tensor& view() const { return tensor.view(); }
  [[nodiscard]] PlacedTensor::Now now() const {
    std::vector<std::byte> image(tensor.original().size());
    tensor.for_each_piece([&](size_t at, size_t to, size_t bytes) {
      std::memcpy(image.data() + to, bytes_at(at), bytes);
    });
    return tensor.now(image);
  }
  [[nodiscard]] std::byte* bytes_at(size_t at) const {
    return static_cast<std::byte*>(memory.data()) + at;
  }

  PlacedTensor tensor;
  Buffer memory;
};

TEST(PlacedTensor, KeepsElementsInEveryLayoutAndSeesStrayWrites) {
  std::vector<float> values(2 * 3 * 4 * 5);
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i);
  const Tensor dense(values.data(), DType::f32, {2, 3, 4, 5});
  for (const Layout layout : kLayouts) {
    SCOPED_TRACE(name_of(layout));
    const Placed placed(dense, layout, false, 2);
    const PlacedTensor::Now now = placed.now();
    ASSERT_EQ(now.elements.size(), values.size() * 4);
    EXPECT_EQ(std::memcmp(now.elements.data(), values.data(), now.elements.size()), 0);
    EXPECT_TRUE(now.same_elements && now.same_surroundings);
    const Tensor& view = placed.view();
    EXPECT_EQ(view.stride[0], 3 * view.stride[1]) << "leading dimensions flatten";
    EXPECT_EQ(view.contiguous(), layout != Layout::strided && layout != Layout::padded);
    const auto address = reinterpret_cast<uintptr_t>(view.data) % 64;
    EXPECT_EQ(address, layout == Layout::misaligned ? 4U : 0U);
    view.as<float>()[7] = 99;  // an element, or in a gap
    EXPECT_NE(placed.now().same_elements, placed.now().same_surroundings);
    view.as<float>()[-1] = 99;
    EXPECT_FALSE(placed.now().same_surroundings) << "before the first element";
  }
  const Placed strided(dense, Layout::strided, false, 1);
  strided.view().as<float>()[5] = 1;
  EXPECT_FALSE(strided.now().same_surroundings) << "behind a row";
  const Placed packed(dense, Layout::strided, true, 1);
  EXPECT_TRUE(packed.view().contiguous()) << "the table wants it so";
}

TEST(PlacedTensor, FarTokensAndBareMemory) {
  std::vector<uint8_t> values(3 * 4 * 5);
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<uint8_t>(i);
  const Tensor dense(values.data(), DType::u8, {3, 4, 5});
  const Placed far(dense, Layout::far, false, 1);
  const Tensor& view = far.view();
  EXPECT_GT(2 * view.stride[0], int64_t{1} << 31);
  const PlacedTensor::Now now = far.now();
  EXPECT_EQ(std::memcmp(now.elements.data(), values.data(), now.elements.size()), 0);
  EXPECT_TRUE(now.same_elements && now.same_surroundings);
  EXPECT_EQ(view.as<uint8_t>()[2 * view.stride[0] + 19], 59);
  view.as<uint8_t>()[view.stride[0] + 20] = 1;
  EXPECT_FALSE(far.now().same_surroundings) << "behind a token";
  const Placed packed(dense, Layout::far, true, 1);
  EXPECT_TRUE(packed.view().contiguous()) << "the table wants it so";

  const Placed bare(dense, Layout::bare, false, 1);
  EXPECT_EQ(bare.view().data, bare.memory.data());
  EXPECT_EQ(bare.memory.bytes(), values.size());
}

// --- implementations that are wrong in one way ---------------------------------------------------

using toy::P;

struct View {
  const P& p;
  const Call& call;
  float* out(int64_t t, int64_t h) const {
    return p.out.as<float>() + t * p.out.stride[0] + h * p.out.stride[1];
  }
};

template <class Body>
void run_then(const Call& call, const Body& body) {
  toy::run(call);
  const P& p = *static_cast<const P*>(call.params);
  if (call.bound["T"] > 0) body(View{p, call});
}

void wrong_value(const Call& call) {
  run_then(call, [&](const View& v) { v.out(call.bound["T"] - 1, 0)[0] += 1e-3F; });
}
void never_written(const Call& call) {
  const P& p = *static_cast<const P*>(call.params);
  const View v{p, call};
  const float before = call.bound["T"] > 0 ? v.out(0, 0)[0] : 0;
  run_then(call, [&](const View& view) { view.out(0, 0)[0] = before; });
}
void by_threads(const Call& call) {
  run_then(call, [&](const View& v) {
    if (call.context.executor().concurrency() == 3) {
      v.out(0, 0)[0] = std::nextafter(v.out(0, 0)[0], 1e9F);
    }
  });
}
void by_stride(const Call& call) {
  run_then(call, [&](const View& v) {
    if (v.p.x.stride[1] == call.bound["d"] + 3) {
      v.out(0, 0)[0] = std::nextafter(v.out(0, 0)[0], 1e9F);
    }
  });
}
void by_alignment(const Call& call) {
  run_then(call, [&](const View& v) {
    if (reinterpret_cast<uintptr_t>(v.p.x.data) % 16 != 0) {
      v.out(0, 0)[0] = std::nextafter(v.out(0, 0)[0], 1e9F);
    }
  });
}
void into_the_gap(const Call& call) {
  run_then(call, [&](const View& v) {
    const int64_t d = call.bound["d"];
    if (v.p.out.stride[1] > d) v.out(0, 0)[d] = 7;
  });
}
void past_the_end(const Call& call) {
  run_then(call, [&](const View& v) {
    v.out(call.bound["T"] - 1, call.bound["n"] - 1)[call.bound["d"]] = 7;
  });
}
void into_an_input(const Call& call) {
  run_then(call, [&](const View& v) { v.p.both.as<float>()[0] = 7; });
}
void by_batch(const Call& call) {
  run_then(call, [&](const View& v) {
    if (call.bound["T"] == 1) v.out(0, 0)[0] = std::nextafter(v.out(0, 0)[0], 1e9F);
  });
}
void in_place_reads_late(const Call& call) {
  run_then(call, [&](const View& v) {
    if (v.p.out.data == v.p.x.data) v.out(0, 0)[0] *= 2;
  });
}
std::string_view always(const Call&) { return "always"; }

// Checks one implementation beside a sound reference and returns what was found.
std::vector<std::string> findings(void (*run)(const Call&), const std::string& settings = {}) {
  static Implementation list[3];
  list[0] = {"cpu", Device::cpu, nullptr, run, nullptr};
  list[1] = {"reference", Device::cpu, nullptr, &toy::run, nullptr};
  list[2] = {"reference.f32", Device::cpu, nullptr, &toy::run, nullptr};
  // Without `state`, whose tokens meet, and the second layout of nothing else.
  static const auto table = ehc::table(
      "toy.plain", "0", "", in<&P::x>("x", "A[T,n,d]"), in<&P::both>("both", "A[T,n+1,d]"),
      attribute<&P::eps>("eps").positive(), out<&P::out>("out", "A[T,n,d]").may_alias("x"));
  const Operator op = make_operator<P>(table, list);
  const auto lines = parse_cases("toy.plain eps=1 A=F32 T=9 n=2 d=5 " + settings, "file");
  const CheckReport report = check_operator(op, lines, {Device::cpu, "cpu", 1});
  EXPECT_EQ(report.rows.size(), 1U);
  EXPECT_EQ(report.rows[0].failures, static_cast<int64_t>(report.failures.size()));
  std::vector<std::string> found;
  for (const CheckFailure& f : report.failures) found.push_back(f.what);
  return found;
}

TEST(Check, AcceptsASoundImplementation) {
  EXPECT_THAT(findings(&toy::run), testing::IsEmpty());
  EXPECT_THAT(findings(&toy::run, "fill=nan|extreme|inf|zero"), testing::IsEmpty());
}

TEST(Check, FindsEachFault) {
  using testing::Contains;
  using testing::HasSubstr;
  EXPECT_THAT(findings(&wrong_value), Contains(HasSubstr("'out' differs from the reference")));
  EXPECT_THAT(findings(&never_written), Contains(HasSubstr("with other memory")));
  EXPECT_THAT(findings(&by_threads), Contains(HasSubstr("3 threads")));
  EXPECT_THAT(findings(&by_stride), Contains(HasSubstr("in layout strided")));
  EXPECT_THAT(findings(&by_alignment), Contains(HasSubstr("in layout misaligned")));
  EXPECT_THAT(findings(&into_the_gap), Contains(HasSubstr("memory of 'out' was written")));
  EXPECT_THAT(findings(&past_the_end), Contains(HasSubstr("memory of 'out' was written")));
  EXPECT_THAT(findings(&into_an_input), Contains(HasSubstr("memory of 'both' was written")));
  EXPECT_THAT(findings(&by_batch), Contains(HasSubstr("when token 0 is alone")));
  EXPECT_THAT(findings(&in_place_reads_late), Contains(HasSubstr("in layout aliased")));
}

TEST(Check, AnExactOutputHasTheBitsOfThePlainLoops) {
  static Implementation list[] = {{"cpu", Device::cpu, nullptr,
                                   [](const Call& call) {
                                     run_then(call, [](const View& v) {
                                       v.out(0, 0)[0] = std::nextafter(v.out(0, 0)[0], 1e9F);
                                     });
                                   },
                                   nullptr},
                                  {"reference", Device::cpu, nullptr, &toy::run, nullptr},
                                  {"reference.f32", Device::cpu, nullptr, &toy::run, nullptr}};
  static const auto table = ehc::table(
      "toy.exact", "0", "", in<&P::x>("x", "A[T,n,d]"), in<&P::both>("both", "A[T,n+1,d]"),
      attribute<&P::eps>("eps").positive(), out<&P::out>("out", "A[T,n,d]").exact());
  const Operator op = make_operator<P>(table, list);
  const auto lines = parse_cases("toy.exact eps=1 A=F32 T=9 n=2 d=5", "file");
  const CheckReport report = check_operator(op, lines, {Device::cpu, "cpu", 1});
  ASSERT_GE(report.failures.size(), 1U);
  EXPECT_THAT(report.failures[0].what,
              testing::HasSubstr("'out' is exact, but first at element 0"));
}

TEST(Check, SoManyCasesAreSpreadOverTheList) {
  const auto lines = parse_cases("toy eps=1 A=F32 T=1|2|3|4|5|6|7|8 n=2 d=5", "file");
  CheckOptions options;
  options.implementation = "reference";
  options.most = 3;
  EXPECT_EQ(check_operator(toy::kOperator, lines, options).rows[0].cases, 3);
  options.most = 100;
  EXPECT_EQ(check_operator(toy::kOperator, lines, options).rows[0].cases, 8);
}

TEST(Check, SlicesHaveEveryCaseOnce) {
  const auto lines = parse_cases("toy eps=1 A=F32 T=1|2|3|4|5|6|7|8 n=2 d=5", "file");
  CheckOptions options;
  options.implementation = "reference";
  options.slices = 3;
  int64_t cases = 0;
  for (options.slice = 0; options.slice < 3; ++options.slice) {
    cases += check_operator(toy::kOperator, lines, options).rows[0].cases;
  }
  EXPECT_EQ(cases, 8);
}

TEST(ForcedGrid, TakesThePlaceOfThePreferredOneWhileItLives) {
  EXPECT_EQ(free_blocks(132), 132);
  EXPECT_EQ(free_blocks(0), 1);
  {
    const ForcedGrid grid(7);
    EXPECT_FALSE(grid.was_asked());
    EXPECT_EQ(free_blocks(132), 7);
    EXPECT_TRUE(grid.was_asked());
  }
  EXPECT_EQ(free_blocks(132), 132);
}

TEST(Check, AFailingLayoutCanBeRunAlone) {
  EXPECT_THAT(findings(&by_stride, "memory=strided"),
              testing::ElementsAre(testing::HasSubstr("in layout strided")));
  EXPECT_THAT(findings(&by_stride, "memory=misaligned"), testing::IsEmpty());
  EXPECT_THAT(findings(&toy::run, "memory=diagonal"),
              testing::ElementsAre(testing::HasSubstr("memory: expected contiguous")));
}

TEST(Check, CountsRefusals) {
  static constexpr Implementation kList[] = {
      {"cpu.a", Device::cpu, &always, &toy::run, nullptr},
      {"reference", Device::cpu, nullptr, &toy::run, nullptr},
  };
  Operator op = toy::kOperator;
  op.implementations = kList;
  const auto lines = parse_cases("toy eps=1 A=F32 T=3|4 n=2 d=5", "file");
  const CheckReport report = check_operator(op, lines, {});
  ASSERT_EQ(report.rows.size(), 2U);
  EXPECT_EQ(report.rows[0].refused, 2);
  EXPECT_EQ(report.rows[0].cases, 0);
  EXPECT_EQ(report.rows[1].cases, 2);
}

TEST(Check, LevelsAboveTheIntensityAreLeftOut) {
  const auto lines = parse_cases("toy eps=1 A=F32 T=3 n=2 d=5 level=1|2|3", "file");
  EXPECT_EQ(check_operator(toy::kOperator, lines, {Device::cpu, "reference", 2}).rows[0].cases, 2);
}

TEST(Check, ACaseThatCannotRunIsADifference) {
  const auto lines = parse_cases("toy eps=-1 A=F32 T=3 n=2 d=5", "file");
  const CheckReport report = check_operator(toy::kOperator, lines, {});
  ASSERT_EQ(report.failures.size(), 1U);
  EXPECT_THAT(report.failures[0].what, testing::HasSubstr("attribute 'eps'"));
}

// --- bytes ---------------------------------------------------------------------------------------

double bytes_of_case(const std::string& text) {
  const CaseLine line = parse_cases(text, "file").front();
  const Operator* op = find_operator(line.op);
  if (op == nullptr) throw Error(ErrorKind::contract, "no operator " + line.op);
  const CaseInputs inputs(*op, line);
  DynamicCall call(*op);
  inputs.bind(call);
  return traffic_of(inputs, call.outputs()).total();
}

TEST(Bytes, FollowTheContract) {
  // Hash: 4 Nmax read, 4 L C written a token, and the small tables.
  EXPECT_EQ(bytes_of_case("engram.hash T=100 L=2 Nmax=3 Kh=8"),
            100 * (4 * 3 + 4 * 2 * 16) + 8 * 2 * 3 + 4 * 2 * 16 + 4 * 2 * 16);
  // Gate: (6n+2) d bytes of bf16 a token, and the fused weight once.
  EXPECT_EQ(bytes_of_case("engram.gate_fwd T=50 n=4 d=64 A=BF16 eps=1 clamp=1"),
            50 * 26 * 64 + 4 * 4 * 64);
  EXPECT_EQ(bytes_of_case("engram.gate_fwd T=50 n=4 d=64 A=BF16 eps=1 clamp=1 inplace=true"),
            50 * 26 * 64 + 4 * 4 * 64)
      << "in place an element is read and written too";
  EXPECT_EQ(bytes_of_case("engram.gate_fwd T=50 n=4 d=64 A=BF16 eps=1 clamp=1 save=true"),
            50 * (26 * 64 + 16 * 4) + 4 * 4 * 64);
  // Gather: only the rows that are touched.
  EXPECT_EQ(
      bytes_of_case("engram.gather_fwd T=10 Nmax=3 Kh=2 rows=100000 hd=8 table=BF16 index=same"),
      10 * 4 * (8 * 2 + 8 * 2 + 4));
  EXPECT_EQ(
      bytes_of_case("engram.gather_fwd T=10 Nmax=3 Kh=2 rows=100000 hd=8 table=BF16 index=none"),
      10 * 4 * (8 * 2 + 4));
  // Optimizer: 16 + 4 repeat + 12 bytes an element, 5 rounds when nothing is said.
  const std::string step = "engram.optimizer_step rows=30 hd=7 weight=F32 grad=F32 momentum=F32";
  EXPECT_EQ(bytes_of_case(step + " lr=1 eps=1"), 30 * 7 * (16 + 4 * 5 + 12));
  EXPECT_EQ(bytes_of_case(step + " lr=1 eps=1 repeat=8"), 30 * 7 * (16 + 4 * 8 + 12));
}

TEST(Bench, TimesACaseAndACall) {
  const CaseInputs inputs = toy_inputs("T=64 n=2 d=4 resident=true");
  BenchCase bench(inputs, Context::cpu(2));
  EXPECT_EQ(bench.bytes(), 4.0 * 64 * (8 + 12 + 8));
  const Timing timing = bench.time("", 0.01);
  EXPECT_EQ(timing.implementation, "cpu.narrow");
  EXPECT_GT(timing.best, 0);
  EXPECT_GE(timing.median, timing.best);
  EXPECT_GE(timing.repeats, 1);
  EXPECT_EQ(bench.time("cpu.scratch", 0).implementation, "cpu.scratch");
  const CaseInputs wide = toy_inputs("T=64 n=2 d=5 resident=true");
  EXPECT_EQ(BenchCase(wide, Context::cpu(1)).time("cpu.narrow", 0).implementation, "") << "refused";
}

}  // namespace
}  // namespace ehc::cli
