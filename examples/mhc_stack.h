// How to wire a model of hyper-connections: sublayers around any layer F, Engram layers between
// some of them, forward and backward, keeping all that a backward needs or making part of it again.
//
// Sublayer l gets the streams x_l; all of pre_l, post_l, comb_l are made of x_l.
//   classic      x_(l+1) = post(F_l(collapse(x_l, pre_l)), x_l, post_l, comb_l)
//                hidden = head(x_L), with a mix of its own
//   single_pass  F_l collapses with pre_(l-1), F_0 with stream 0 alone;
//                hidden = collapse(x_L, pre_(L-1))
// An Engram layer adds to the streams between the exit of a sublayer and the entry of the next one.
//
// Calls of the forward, where a seam is the exit of one sublayer and the entry of the next one:
//   classic      expand_fwd and pre_fwd, or seam_broadcast_fwd
//                F, seam_classic_fwd, F, seam_classic_fwd, ..., F, post_fwd
//                head_fwd
//   single_pass  seam_broadcast_fwd
//                F, seam_single_pass_fwd, F, seam_single_pass_fwd, ..., F, post_fwd
//                pre_apply_fwd
//   in place of the seam at an Engram layer: post_fwd, layer_fwd, the entry alone
// The backward calls the backward of each in the opposite order.
//
// Nothing is hidden: what a forward keeps is its result and goes to the backward, and gradients of
// parameters are written, or added to, where the caller says.
#pragma once

#include <ehc/engram/gather.h>
#include <ehc/engram/gather_bwd.h>
#include <ehc/engram/kv_projection.h>
#include <ehc/engram/kv_projection_bwd.h>
#include <ehc/engram/layer.h>
#include <ehc/engram/layer_bwd.h>
#include <ehc/mhc.h>

#include <algorithm>
#include <initializer_list>
#include <utility>
#include <vector>

#include "arrays.h"
#include "mhc_parameters.h"

namespace example {

namespace engram = ehc::engram;

// What changes no formula.
struct Plan {
  bool has_seams = true;    // or post and the entry behind it are calls of their own
  bool saves_state = true;  // or the backward makes the mixes again
  // The first entry makes use of it that all streams are one row; in the single-pass form always.
  bool broadcasts = false;
  mhc::Rounding rounding = mhc::Rounding::once;
  // The first sublayers of blocks that are computed again in the backward; empty: none are. Engram
  // layers stand only in front of these: see best_blocks.
  std::vector<int32_t> blocks{};
};

// What there is of one sublayer between its forward and its backward.
struct Kept {
  Array before;                        // A[T,n,d], the streams before the Engram layer in front
  Array residual;                      // A[T,n,d], x_l
  Array layer_input, layer_output;     // A[T,d]
  Array pre, post, comb;               // F32, small
  Array mixes, mul, sqr, comb_logits;  // F32, small: the rest of the state

  // For a forward to write. A backward takes it when all of it was written, else none of it.
  [[nodiscard]] mhc::MixState state() const { return {pre, mixes, mul, sqr, comb_logits, comb}; }
  [[nodiscard]] bool has_state() const { return mixes.present(); }
};

struct Tape {
  std::vector<Kept> sublayers;
  Array last;  // A[T,n,d], x_L
};

// Where gradients of parameters go: F32 tensors, which are overwritten or added to (main_grad).
struct Gradients {
  const Parameters& of;
  bool are_added = false;

  [[nodiscard]] Tensor target(const Array& gradient) const {
    return are_added ? Tensor(gradient) : Tensor();
  }
};

class Stack {
 public:
  // All are references to what must live as long, but for the plan.
  Stack(Runtime& runtime, const Config& config, Plan plan, const Parameters& parameters,
        const std::vector<Layer>& layers)
      : run_(runtime),
        c_(config),
        plan_(std::move(plan)),
        parameters_(parameters),
        layers_(layers) {
    const int64_t n = c_.streams;
    stream_0_ = coefficients();
    identity_ = maps();
    no_post_ = coefficients();
    no_output_ = rows();
    for (int64_t t = 0; t < c_.tokens; ++t) {
      set(stream_0_, t * n, 1);
      for (int64_t i = 0; i < n; ++i) set(identity_, (t * n + i) * n + i, 1);
    }
  }

  // hidden: A[T,d], what the final norm and the projection to the vocabulary get.
  Tape forward(const Batch& batch, const Tensor& hidden) {
    Tape tape;
    tape.sublayers.resize(layers_.size());
    begin(batch, at(tape, 0));
    for (int64_t l = 0; l < c_.sublayers; ++l) {
      Kept& k = at(tape, l);
      k.layer_output = rows();
      layer(l).forward(k.layer_input, k.layer_output);
      advance(batch, tape, l);
      if (recomputes()) forget(k, is_block_start(l));
    }
    end(tape, hidden);
    if (recomputes()) tape.last = {};
    return tape;
  }

  // Frees the tape on its way.
  void backward(const Batch& batch, Tape tape, const Tensor& grad_hidden,
                const Gradients& gradients, const Tensor& grad_input) {
    if (recomputes()) replay(batch, tape, plan_.blocks.back());
    Flow flow = end_bwd(tape, grad_hidden, gradients);
    tape.last = {};
    for (int64_t l = c_.sublayers - 1; l >= 0; --l) {
      Kept& k = at(tape, l);
      flow.layer_input = rows();
      layer(l).backward(k.layer_input, k.layer_output, flow.layer_output, flow.layer_input);
      if (l == 0) return begin_bwd(batch, k, flow, gradients, grad_input);
      if (recomputes() && is_block_start(l)) replay(batch, tape, start_of_block(l - 1));
      flow = retreat(batch, tape, l, std::move(flow), gradients);
      k = {};
    }
  }

 private:
  // Gradients on their way backward: of x_l and of what sublayer l made of it.
  struct Flow {
    Array residual, layer_output, layer_input, pre, post, comb;
  };

  // --- forward -----------------------------------------------------------------------------------

  void begin(const Batch& batch, Kept& k) {
    make_room(k);
    if (!broadcasts()) {
      run_.call(&mhc::expand_fwd,
                {.hidden = batch.hidden, .residual = k.residual, .n = c_.streams});
      return enter(0, k, {});
    }
    if (!k.pre.present()) k.pre = coefficients();
    mhc::SeamBroadcastForward p{.hidden = batch.hidden,
                                .residual = k.residual,
                                .layer_input = k.layer_input,
                                .post = k.post,
                                .state = k.state(),
                                .form = c_.form};
    set_weights(p, 0);
    run_.call(&mhc::seam_broadcast_fwd, p);
  }

  // From the output of layer l to the input of the next one, or to the last streams.
  void advance(const Batch& batch, Tape& tape, int64_t l) {
    const Kept& k = at(tape, l);
    if (l + 1 == c_.sublayers) {
      tape.last = streams();
      return post(k, tape.last);
    }
    Kept& next = at(tape, l + 1);
    make_room(next);
    const int64_t e = engram_before(l + 1);
    if (e >= 0) {
      next.before = streams();
      post(k, next.before);
      engram_fwd(batch, e, next.before, next.residual);
      enter(l + 1, next, k.pre);
    } else if (!plan_.has_seams) {
      post(k, next.residual);
      enter(l + 1, next, k.pre);
    } else if (c_.form == SeamForm::classic) {
      mhc::SeamClassicForward p;
      set_exit(p, k);
      seam(&mhc::seam_classic_fwd, p, l + 1, next, next.residual);
    } else {
      mhc::SeamSinglePassForward p{.pre = k.pre};
      set_exit(p, k);
      seam(&mhc::seam_single_pass_fwd, p, l + 1, next, next.residual);
    }
  }

  void post(const Kept& k, const Tensor& new_residual) {
    run_.call(&mhc::post_fwd, {.layer_output = k.layer_output,
                               .residual = k.residual,
                               .post = k.post,
                               .comb = k.comb,
                               .new_residual = new_residual});
  }

  // The entry of sublayer l alone. `earlier_pre`: of the sublayer before.
  void enter(int64_t l, const Kept& k, const Tensor& earlier_pre) {
    if (c_.form == SeamForm::classic) {
      mhc::PreForward p{
          .residual = k.residual, .layer_input = k.layer_input, .post = k.post, .state = k.state()};
      set_weights(p, l);
      return run_.call(&mhc::pre_fwd, p);
    }
    // In this form there is none without an exit, so: the exit that leaves the streams as they are.
    const Array same_streams = streams();
    mhc::SeamSinglePassForward p{.pre = earlier_pre};
    set_empty_exit(p, k);
    seam(&mhc::seam_single_pass_fwd, p, l, k, same_streams);
  }

  template <class P>
  void seam(void (*op)(ehc::Context&, const P&), P& p, int64_t l, const Kept& next,
            const Tensor& new_residual) {
    p.new_residual = new_residual;
    p.layer_input = next.layer_input;
    p.next_post = next.post;
    p.next_state = next.state();
    set_weights(p, l);
    run_.call(op, p);
  }

  void end(const Tape& tape, const Tensor& hidden) {
    if (c_.form == SeamForm::classic) {
      return run_.call(&mhc::head_fwd, {.residual = tape.last,
                                        .weights = weights_of(parameters_.head),
                                        .hidden = hidden,
                                        .norm_eps = c_.rules.norm_eps,
                                        .pre_eps = c_.rules.pre_eps});
    }
    run_.call(&mhc::pre_apply_fwd,
              {.residual = tape.last, .pre = tape.sublayers.back().pre, .layer_input = hidden});
  }

  // --- Engram ------------------------------------------------------------------------------------

  // Rows of the table, and of them keys and a value. A backward makes both again.
  struct Memory {
    Array embedding, kv;
  };
  Memory recall(const Batch& batch, int64_t e) {
    const EngramParameters& w = parameters_.engrams[index(e)];
    Memory m{embeddings(), keys_and_values()};
    run_.call(&engram::gather_fwd,
              {.table = w.table, .indices = batch.indices[index(e)], .embedding = m.embedding});
    run_.call(&engram::kv_projection_fwd,
              {.embedding = m.embedding, .weight = w.kv_weight, .kv = m.kv});
    return m;
  }

  void engram_fwd(const Batch& batch, int64_t e, const Tensor& before, const Tensor& residual) {
    const Memory m = recall(batch, e);
    engram::LayerForward p{.kv = m.kv, .out = residual};
    set_engram(p, e, before);
    run_.call(&engram::layer_fwd, p);
  }

  void engram_bwd(const Batch& batch, int64_t e, const Tensor& before, const Tensor& grad_out,
                  const Gradients& gradients, const Tensor& grad_before) {
    const EngramParameters& g = gradients.of.engrams[index(e)];
    const Memory m = recall(batch, e);
    const Array grad_kv = keys_and_values();
    engram::LayerBackward p{
        .grad_out = grad_out,
        .kv = m.kv,
        .grad_weight_hidden_acc = gradients.target(g.weight_hidden),
        .grad_weight_embed_acc = gradients.target(g.weight_embed),
        .grad_conv_weight_acc = gradients.target(g.conv_weight),
        .grad_conv_norm_weight_acc = gradients.target(g.conv_norm_weight),
        .grad_residual = grad_before,
        .grad_kv = grad_kv,
        .grad_weight_hidden = g.weight_hidden,
        .grad_weight_embed = g.weight_embed,
        .grad_conv_weight = g.conv_weight,
        .grad_conv_norm_weight = g.conv_norm_weight,
    };
    set_engram(p, e, before);
    run_.call(&engram::layer_bwd, p);
    const Array grad_embedding = embeddings();
    const Array grad_bias = run_.zeros(DType::f32, {c_.streams + 1, c_.width});  // there is none
    run_.call(&engram::kv_projection_bwd, {.grad_kv = grad_kv,
                                           .embedding = m.embedding,
                                           .weight = parameters_.engrams[index(e)].kv_weight,
                                           .grad_weight_acc = gradients.target(g.kv_weight),
                                           .grad_embedding = grad_embedding,
                                           .grad_weight = g.kv_weight,
                                           .grad_bias = grad_bias});
    run_.call(&engram::gather_bwd, {.grad_embedding = grad_embedding,
                                    .indices = batch.indices[index(e)],
                                    .grad_table_acc = gradients.target(g.table),
                                    .rows = c_.engram.rows,
                                    .grad_table = g.table});
  }

  // --- recomputation -----------------------------------------------------------------------------

  // Leaves what `replay` starts from.
  static void forget(Kept& k, bool is_first_of_block) {
    if (!is_first_of_block) k.residual = {};
    k.before = {};
    k.layer_input = {};
    for (Array* part : {&k.mixes, &k.mul, &k.sqr, &k.comb_logits}) *part = {};
  }

  // Makes again what was left out of the block that begins with sublayer `first`: the same bits.
  void replay(const Batch& batch, Tape& tape, int64_t first) {
    int64_t end = first + 1;
    while (end < c_.sublayers && !is_block_start(end)) ++end;
    std::vector<Tensor> pre, layer_output, post, comb, layer_input, new_residual;
    for (int64_t l = first; l < end; ++l) {
      Kept& k = at(tape, l);
      k.layer_input = rows();
      layer_input.push_back(k.layer_input);
      pre.push_back(collapse_mix(tape, l));
      Array* behind = streams_behind(tape, l, l + 1 == end);
      if (behind == nullptr) break;
      *behind = streams();
      new_residual.push_back(*behind);
      layer_output.push_back(k.layer_output);
      post.push_back(k.post);
      comb.push_back(k.comb);
    }
    run_.call(&mhc::multilayer_recompute, {.residual = at(tape, first).residual,
                                           .pre = pre,
                                           .layer_output = layer_output,
                                           .post = post,
                                           .comb = comb,
                                           .layer_input = layer_input,
                                           .new_residual = new_residual});
    if (c_.layer_norm_eps == 0) return;
    // It collapses; the norm behind that belongs to the entry, which gives the state as well.
    for (int64_t l = first; l < end; ++l) {
      Kept& k = at(tape, l);
      if (l == 0) {
        begin(batch, k);
      } else {
        make_room(k);
        enter(l, k, at(tape, l - 1).pre);
      }
    }
  }
  // Where a replay puts the streams that sublayer l makes; null: the next block has them.
  Array* streams_behind(Tape& tape, int64_t l, bool is_last_of_block) const {
    if (l + 1 == c_.sublayers) return &tape.last;
    Kept& next = at(tape, l + 1);
    if (!is_last_of_block) return &next.residual;
    return engram_before(l + 1) >= 0 ? &next.before : nullptr;
  }
  [[nodiscard]] Tensor collapse_mix(Tape& tape, int64_t l) const {
    if (c_.form == SeamForm::classic) return at(tape, l).pre;
    return l == 0 ? stream_0_ : at(tape, l - 1).pre;
  }
  [[nodiscard]] bool recomputes() const { return !plan_.blocks.empty(); }
  [[nodiscard]] bool is_block_start(int64_t l) const {
    return std::find(plan_.blocks.begin(), plan_.blocks.end(), l) != plan_.blocks.end();
  }
  [[nodiscard]] int64_t start_of_block(int64_t l) const {
    while (!is_block_start(l)) --l;
    return l;
  }

  // --- backward ----------------------------------------------------------------------------------

  Flow end_bwd(const Tape& tape, const Tensor& grad_hidden, const Gradients& gradients) {
    Flow flow;
    const Array grad_last = streams();
    if (c_.form == SeamForm::classic) {
      mhc::HeadBackward p{.grad_hidden = grad_hidden,
                          .residual = tape.last,
                          .weights = weights_of(parameters_.head),
                          .grad_residual = grad_last,
                          .norm_eps = c_.rules.norm_eps,
                          .pre_eps = c_.rules.pre_eps,
                          .rounding = plan_.rounding};
      set_mix_gradients(p, gradients, gradients.of.head);
      run_.call(&mhc::head_bwd, p);
    } else {
      flow.pre = coefficients();
      run_.call(&mhc::pre_apply_bwd, {.grad_layer_input = grad_hidden,
                                      .residual = tape.last,
                                      .pre = tape.sublayers.back().pre,
                                      .grad_residual = grad_last,
                                      .grad_pre = flow.pre});
    }
    post_bwd(tape.sublayers.back(), grad_last, flow);
    return flow;
  }

  // From the input of layer l to the output of the layer before it.
  Flow retreat(const Batch& batch, Tape& tape, int64_t l, Flow flow, const Gradients& gradients) {
    const Kept& k = at(tape, l);
    const Kept& earlier = at(tape, l - 1);
    const int64_t e = engram_before(l);
    Flow out;
    if (e < 0 && plan_.has_seams) {
      if (c_.form == SeamForm::classic) {
        mhc::SeamClassicBackward p;
        set_exit(p, earlier);
        seam_bwd(&mhc::seam_classic_bwd, p, l, k, flow, gradients, out);
      } else {
        out.pre = coefficients();
        mhc::SeamSinglePassBackward p{
            .grad_next_pre = flow.pre, .pre = earlier.pre, .grad_pre = out.pre};
        set_exit(p, earlier);
        seam_bwd(&mhc::seam_single_pass_bwd, p, l, k, flow, gradients, out);
      }
      return out;
    }
    enter_bwd(l, k, earlier.pre, flow, gradients, out);
    if (e >= 0) {
      Array grad_before = streams();
      engram_bwd(batch, e, k.before, flow.residual, gradients, grad_before);
      flow.residual = std::move(grad_before);
    }
    post_bwd(earlier, flow.residual, out);
    return out;
  }

  void post_bwd(const Kept& k, const Tensor& grad_new_residual, Flow& out) {
    make_room(out);
    run_.call(&mhc::post_bwd, {.grad_new_residual = grad_new_residual,
                               .layer_output = k.layer_output,
                               .residual = k.residual,
                               .post = k.post,
                               .comb = k.comb,
                               .grad_layer_output = out.layer_output,
                               .grad_residual = out.residual,
                               .grad_post = out.post,
                               .grad_comb = out.comb});
  }

  // Adds its part to flow.residual; what the collapse gives back to an earlier mix goes to out.pre.
  void enter_bwd(int64_t l, const Kept& k, const Tensor& earlier_pre, Flow& flow,
                 const Gradients& gradients, Flow& out) {
    if (c_.form == SeamForm::classic) {
      mhc::PreBackward p{.grad_layer_input = flow.layer_input,
                         .grad_post = flow.post,
                         .grad_comb = flow.comb,
                         .residual = k.residual,
                         .grad_residual_acc = flow.residual,
                         .grad_residual = flow.residual,
                         .rounding = plan_.rounding};
      if (k.has_state()) p.state = k.state();
      set_weights(p, l);
      set_gradients(p, l, gradients);
      return run_.call(&mhc::pre_bwd, p);
    }
    out.pre = coefficients();
    Flow of_empty_exit;
    mhc::SeamSinglePassBackward p{
        .grad_next_pre = flow.pre, .pre = earlier_pre, .grad_pre = out.pre};
    set_empty_exit(p, k);
    seam_bwd(&mhc::seam_single_pass_bwd, p, l, k, flow, gradients, of_empty_exit);
    flow.residual = std::move(of_empty_exit.residual);
  }

  template <class P>
  void seam_bwd(void (*op)(ehc::Context&, const P&), P& p, int64_t l, const Kept& next,
                const Flow& flow, const Gradients& gradients, Flow& out) {
    make_room(out);
    p.grad_new_residual = flow.residual;
    p.grad_layer_input = flow.layer_input;
    p.grad_next_post = flow.post;
    p.grad_next_comb = flow.comb;
    if (next.has_state()) {
      p.new_residual = next.residual;
      p.next_state = next.state();
    }
    p.grad_layer_output = out.layer_output;
    p.grad_residual = out.residual;
    p.grad_post = out.post;
    p.grad_comb = out.comb;
    p.rounding = plan_.rounding;
    set_weights(p, l);
    set_gradients(p, l, gradients);
    run_.call(op, p);
  }

  void begin_bwd(const Batch& batch, const Kept& k, Flow& flow, const Gradients& gradients,
                 const Tensor& grad_input) {
    if (!broadcasts()) {
      Flow nothing;
      enter_bwd(0, k, {}, flow, gradients, nothing);
      return run_.call(&mhc::expand_bwd,
                       {.grad_residual = flow.residual, .grad_hidden = grad_input});
    }
    mhc::SeamBroadcastBackward p{.grad_residual = flow.residual,
                                 .grad_layer_input = flow.layer_input,
                                 .grad_pre = flow.pre,
                                 .grad_post = flow.post,
                                 .grad_comb = flow.comb,
                                 .hidden = batch.hidden,
                                 .grad_hidden = grad_input,
                                 .form = c_.form};
    if (k.has_state()) p.state = k.state();
    set_weights(p, 0);
    set_gradients(p, 0, gradients);
    run_.call(&mhc::seam_broadcast_bwd, p);
  }

  // --- arguments that many calls have ------------------------------------------------------------

  template <class P>
  void set_exit(P& p, const Kept& k) const {
    p.layer_output = k.layer_output;
    p.residual = k.residual;
    p.post = k.post;
    p.comb = k.comb;
  }
  template <class P>
  void set_empty_exit(P& p, const Kept& k) const {
    p.layer_output = no_output_;
    p.residual = k.residual;
    p.post = no_post_;
    p.comb = identity_;
  }
  template <class P>
  void set_weights(P& p, int64_t l) const {
    const MixParameters& w = parameters_.sublayers[index(l)];
    p.weights = weights_of(w);
    p.rules = c_.rules;
    if (c_.layer_norm_eps == 0) return;
    p.layer_norm_weight = w.layer_norm_weight;
    p.layer_norm_eps = c_.layer_norm_eps;
  }
  template <class P>
  static void set_mix_gradients(P& p, const Gradients& gradients, const MixParameters& g) {
    p.gradients = {g.fn, g.scale, g.base, g.norm_weight};
    if (gradients.are_added) p.targets = p.gradients;
  }
  template <class P>
  void set_gradients(P& p, int64_t l, const Gradients& gradients) const {
    const MixParameters& g = gradients.of.sublayers[index(l)];
    set_mix_gradients(p, gradients, g);
    p.grad_layer_norm_weight = g.layer_norm_weight;
    p.grad_layer_norm_weight_acc = gradients.target(g.layer_norm_weight);
  }
  template <class P>
  void set_engram(P& p, int64_t e, const Tensor& before) const {
    const EngramParameters& w = parameters_.engrams[index(e)];
    p.residual = before;
    p.weight_hidden = w.weight_hidden;
    p.weight_embed = w.weight_embed;
    p.conv_weight = w.conv_weight;
    p.conv_norm_weight = w.conv_norm_weight;
    p.eps = c_.engram.eps;
    p.clamp = c_.engram.clamp;
    p.dilation = c_.engram.dilation;
    p.conv_eps = c_.engram.conv_eps;
  }
  static mhc::MixWeights weights_of(const MixParameters& w) {
    return {w.fn, w.scale, w.base, w.norm_weight};
  }

  // --- memory ------------------------------------------------------------------------------------

  // For what the entry of a sublayer writes, where there is none yet.
  void make_room(Kept& k) {
    const auto add = [&](Array& array, DType type, std::initializer_list<int64_t> shape) {
      if (!array.present()) array = run_.zeros(type, shape);
    };
    const int64_t n = c_.streams;
    const int64_t mixes = n * n + 2 * n;
    add(k.residual, c_.type, {c_.tokens, n, c_.width});
    add(k.layer_input, c_.type, {c_.tokens, c_.width});
    add(k.post, DType::f32, {c_.tokens, n});
    add(k.comb, DType::f32, {c_.tokens, n, n});
    const bool has_state = plan_.saves_state || recomputes();
    if (has_state || c_.form == SeamForm::single_pass) add(k.pre, DType::f32, {c_.tokens, n});
    if (!has_state) return;
    add(k.mixes, DType::f32, {c_.tokens, mixes});
    add(k.mul, DType::f32, {c_.tokens, mixes});
    add(k.sqr, DType::f32, {c_.tokens});
    add(k.comb_logits, DType::f32, {c_.tokens, n, n});
  }
  void make_room(Flow& flow) {
    flow.residual = streams();
    flow.layer_output = rows();
    flow.post = coefficients();
    flow.comb = maps();
  }
  Array streams() { return run_.zeros(c_.type, {c_.tokens, c_.streams, c_.width}); }
  Array rows() { return run_.zeros(c_.type, {c_.tokens, c_.width}); }
  Array coefficients() { return run_.zeros(DType::f32, {c_.tokens, c_.streams}); }
  Array maps() { return run_.zeros(DType::f32, {c_.tokens, c_.streams, c_.streams}); }
  Array embeddings() {
    return run_.zeros(c_.type, {c_.tokens, c_.engram.row_count * c_.engram.row_width});
  }
  Array keys_and_values() { return run_.zeros(c_.type, {c_.tokens, c_.streams + 1, c_.width}); }

  [[nodiscard]] bool broadcasts() const {
    return plan_.broadcasts || c_.form == SeamForm::single_pass;
  }
  static size_t index(int64_t i) { return static_cast<size_t>(i); }
  static Kept& at(Tape& tape, int64_t l) { return tape.sublayers[index(l)]; }
  [[nodiscard]] const Layer& layer(int64_t l) const { return layers_[index(l)]; }
  // Number of the Engram layer in front of sublayer l; -1: none.
  [[nodiscard]] int64_t engram_before(int64_t l) const {
    const auto& all = c_.engram.before;
    const auto found = std::find(all.begin(), all.end(), l);
    return found == all.end() ? -1 : found - all.begin();
  }

  Runtime& run_;
  const Config& c_;
  Plan plan_;
  const Parameters& parameters_;
  const std::vector<Layer>& layers_;
  // Mixes of stream 0 alone; an exit that leaves the streams as they are.
  Array stream_0_, identity_, no_post_, no_output_;
};

// For Plan::blocks.
struct Blocks {
  int32_t length = 0;
  std::vector<int32_t> starts;
};
// Blocks of the best length. They do not cross an Engram layer, which changes the streams.
inline Blocks best_blocks(Runtime& runtime, const Config& config) {
  std::vector<int64_t> stages;
  int64_t begin = 0;
  for (const int64_t border : config.engram.before) {
    stages.push_back(border - begin);
    begin = border;
  }
  stages.push_back(config.sublayers - begin);
  mhc::PlanRecompute p{
      .layers = config.sublayers, .n = config.streams, .d = config.width, .stages = stages};
  const Array length = runtime.zeros(DType::i32, {1});
  const Array terms = runtime.zeros(DType::i64, {2});
  const Array starts = runtime.zeros(DType::i32, {mhc::count_recompute_blocks(p)});
  p.block_length = length;
  p.terms = terms;
  p.block_starts = starts;
  runtime.call(&mhc::plan_recompute, p);
  const Tensor first = starts;
  return {*Tensor(length).as<int32_t>(),
          {first.as<int32_t>(), first.as<int32_t>() + first.numel()}};
}

}  // namespace example
