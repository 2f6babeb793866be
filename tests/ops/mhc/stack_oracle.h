// The stack of examples/mhc_stack.h in double: plain loops over the formulas, no code of the
// library.
#pragma once

#include <map>

#include "examples/mhc_stack.h"
#include "tests/ops/mhc/mix_support.h"

namespace ehc::test {

// Parameters by the names of example::Parameters::all, and "input", the hidden state.
using Values = std::map<std::string, Doubles>;

class StackOracle {
 public:
  // Layer l multiplies by matrices[l]; where that is empty it is a tanh.
  StackOracle(const example::Config& config, const std::vector<std::vector<float>>& matrices,
              const example::Batch& batch)
      : c_(config),
        T(config.tokens),
        n(config.streams),
        d(config.width),
        matrices_(matrices),
        batch_(batch) {}

  [[nodiscard]] Doubles hidden(const Values& values) const {
    const bool is_classic = c_.form == mhc::SeamForm::classic;
    Doubles x(size(T * n * d));
    for (int64_t i = 0; i < T * n * d; ++i) {
      x[size(i)] = values.at("input")[size(i / d / n * d + i % d)];
    }
    Doubles collapse_mix(size(T * n));
    for (int64_t t = 0; t < T; ++t) collapse_mix[size(t * n)] = 1;
    for (int64_t l = 0; l < c_.sublayers; ++l) {
      for (size_t e = 0; e < c_.engram.before.size(); ++e) {
        if (c_.engram.before[e] == l) x = engram(x, values, e);
      }
      const std::string owner = std::to_string(l);
      const Mixes m = mixes(x, values, owner, 3);
      Doubles row = collapse(x, is_classic ? m.pre : collapse_mix);
      if (c_.layer_norm_eps > 0) row = layer_norm(row, values.at(owner + ".layer_norm_weight"));
      x = post(layer(row, matrices_[size(l)]), x, m);
      collapse_mix = m.pre;
    }
    return collapse(x, is_classic ? mixes(x, values, "head", 1).pre : collapse_mix);
  }

 private:
  struct Mixes {
    Doubles pre, post, comb;
  };

  static size_t size(int64_t i) { return static_cast<size_t>(i); }
  static double sigmoid(double u) { return 1 / (1 + std::exp(-u)); }
  // 1 / sqrt(mean of squares + eps) of `count` numbers.
  static double reciprocal_rms(const double* x, int64_t count, double eps) {
    double sum = 0;
    for (int64_t i = 0; i < count; ++i) sum += x[i] * x[i];
    return 1 / std::sqrt(sum / static_cast<double>(count) + eps);
  }

  // With one scale: of the head, which has pre alone.
  [[nodiscard]] Mixes mixes(const Doubles& x, const Values& values, const std::string& owner,
                            int64_t scales) const {
    const Doubles& fn = values.at(owner + ".fn");
    const Doubles& scale = values.at(owner + ".scale");
    const Doubles& base = values.at(owner + ".base");
    const auto norm_weight = values.find(owner + ".norm_weight");
    const int64_t K = n * d;
    Mixes out;
    for (int64_t t = 0; t < T; ++t) {
      const double r = reciprocal_rms(&x[size(t * K)], K, *c_.rules.norm_eps);
      Doubles logits;
      for (int64_t j = 0; j < static_cast<int64_t>(base.size()); ++j) {
        double sum = 0;
        for (int64_t k = 0; k < K; ++k) {
          const double w = norm_weight == values.end() ? 1 : norm_weight->second[size(k)];
          sum += x[size(t * K + k)] * fn[size(j * K + k)] * w;
        }
        const double u = sum * r * scale[size(std::min(scales - 1, j / n))] + base[size(j)];
        if (j < n) {
          out.pre.push_back(sigmoid(u) + *c_.rules.pre_eps);
        } else if (j < 2 * n) {
          out.post.push_back(*c_.rules.post_mult * sigmoid(u));
        } else {
          logits.push_back(u);
        }
      }
      if (scales == 3) append(out.comb, sinkhorn(logits));
    }
    return out;
  }

  static void append(Doubles& to, const Doubles& from) {
    to.insert(to.end(), from.begin(), from.end());
  }

  [[nodiscard]] Doubles sinkhorn(Doubles y) const {
    const double eps = *c_.rules.sinkhorn_eps;
    // Divides each of n lines of n entries by its sum.
    const auto divide = [&](int64_t line, int64_t entry, double added) {
      for (int64_t a = 0; a < n; ++a) {
        double sum = added;
        for (int64_t b = 0; b < n; ++b) sum += y[size(a * line + b * entry)];
        for (int64_t b = 0; b < n; ++b) y[size(a * line + b * entry)] /= sum;
      }
    };
    for (double& u : y) u = std::exp(u);
    divide(n, 1, 0);
    for (double& p : y) p += eps;
    divide(1, n, eps);
    for (int64_t round = 1; round < *c_.rules.repeat; ++round) {
      divide(n, 1, eps);
      divide(1, n, eps);
    }
    return y;
  }

  [[nodiscard]] Doubles collapse(const Doubles& x, const Doubles& pre) const {
    Doubles row(size(T * d));
    for (int64_t i = 0; i < T * n * d; ++i)
      row[size(i / d / n * d + i % d)] += pre[size(i / d)] * x[size(i)];
    return row;
  }

  [[nodiscard]] Doubles layer_norm(Doubles row, const Doubles& weight) const {
    for (int64_t t = 0; t < T; ++t) {
      const double r = reciprocal_rms(&row[size(t * d)], d, c_.layer_norm_eps);
      for (int64_t k = 0; k < d; ++k) row[size(t * d + k)] *= r * weight[size(k)];
    }
    return row;
  }

  [[nodiscard]] Doubles layer(const Doubles& row, const std::vector<float>& matrix) const {
    Doubles out(row.size());
    for (int64_t i = 0; i < T * d; ++i) {
      if (matrix.empty()) {
        out[size(i)] = std::tanh(row[size(i)]);
        continue;
      }
      for (int64_t k = 0; k < d; ++k) {
        out[size(i)] += row[size(i / d * d + k)] * static_cast<double>(matrix[size(k * d + i % d)]);
      }
    }
    return out;
  }

  [[nodiscard]] Doubles post(const Doubles& y, const Doubles& x, const Mixes& m) const {
    Doubles out(x.size());
    for (int64_t t = 0; t < T; ++t) {
      for (int64_t o = 0; o < n; ++o) {
        for (int64_t k = 0; k < d; ++k) {
          double sum = m.post[size(t * n + o)] * y[size(t * d + k)];
          for (int64_t i = 0; i < n; ++i) {
            sum += m.comb[size((t * n + i) * n + o)] * x[size((t * n + i) * d + k)];
          }
          out[size((t * n + o) * d + k)] = sum;
        }
      }
    }
    return out;
  }

  [[nodiscard]] Doubles engram(const Doubles& x, const Values& values, size_t number) const {
    const std::string owner = "engram " + std::to_string(number);
    const auto parameter = [&](const char* name) -> const Doubles& {
      return values.at(owner + "." + name);
    };
    const Doubles& table = parameter("table");
    const Doubles& kv_weight = parameter("kv_weight");
    const example::EngramConfig& e = c_.engram;
    const int64_t width = e.row_count * e.row_width;
    const auto* rows = Tensor(batch_.indices[number]).as<int32_t>();
    Doubles gated(x.size()), normed(x.size());
    for (int64_t t = 0; t < T; ++t) {
      Doubles kv(size((n + 1) * d));  // keys, then the value
      for (int64_t i = 0; i < (n + 1) * d; ++i) {
        for (int64_t c = 0; c < width; ++c) {
          const int64_t row = rows[t * e.row_count + c / e.row_width];
          kv[size(i)] +=
              table[size(row * e.row_width + c % e.row_width)] * kv_weight[size(i * width + c)];
        }
      }
      for (int64_t h = 0; h < n; ++h) {
        const double* stream = &x[size((t * n + h) * d)];
        const double* key = &kv[size(h * d)];
        double dot = 0;
        for (int64_t k = 0; k < d; ++k) {
          dot += stream[k] * key[k] * parameter("weight_hidden")[size(h * d + k)] *
                 parameter("weight_embed")[size(h * d + k)];
        }
        const double z = dot * reciprocal_rms(stream, d, e.eps) * reciprocal_rms(key, d, e.eps) /
                         std::sqrt(static_cast<double>(d));
        const double gate = sigmoid(std::copysign(std::sqrt(std::max(std::fabs(z), e.clamp)), z));
        double* v = &gated[size((t * n + h) * d)];
        for (int64_t k = 0; k < d; ++k) v[k] = gate * kv[size(n * d + k)];
        const double r = reciprocal_rms(v, d, e.conv_eps);
        for (int64_t k = 0; k < d; ++k) {
          normed[size((t * n + h) * d + k)] =
              v[k] * r * parameter("conv_norm_weight")[size(h * d + k)];
        }
      }
    }
    Doubles out(x.size());
    for (int64_t i = 0; i < T * n * d; ++i) {
      double c = 0;
      for (int64_t tap = 0; tap < e.taps; ++tap) {
        const int64_t past = i - (e.taps - 1 - tap) * e.dilation * n * d;
        if (past < 0) continue;
        c += parameter("conv_weight")[size(i % (n * d) * e.taps + tap)] * normed[size(past)];
      }
      out[size(i)] = x[size(i)] + gated[size(i)] + c * sigmoid(c);
    }
    return out;
  }

  const example::Config& c_;
  int64_t T, n, d;
  const std::vector<std::vector<float>>& matrices_;
  const example::Batch& batch_;
};

}  // namespace ehc::test
