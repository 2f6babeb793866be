#!/usr/bin/env bash
# From a real text to updated streams, measured, checked and drawn. See --help.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
start_folder=$OLDPWD

usage() {
  cat <<'TEXT'
Usage: ./demo.sh [options]

Runs the Engram forward path on the King James Bible (or a text of yours): tokenizer, token map,
n-gram windows, hash, table look-up, projection, gate, convolution, streams. Takes the first of these
streams through a stack of mHC sublayers, forward and backward, and trains a small Engram layer.
Prints what it found and writes one HTML page. Installs what is missing on Debian and Ubuntu; a
second run is quick, and a training that was stopped goes on.

  --text FILE         a UTF-8 text instead of the Bible
  --out FOLDER        where results and caches go                       (.demo)
  --tokens N          read only the first N tokens                      (all)
  --dense-tokens N    projection and later stages for the first N       (32768)
  --width N           values per stream                                 (1024)
  --streams N         residual streams, 1 to 8                          (4)
  --sublayers N       mHC sublayers behind Engram, 0 for none           (24)
  --stack-tokens N    run them for the first N tokens                   (4096)
  --sizes A,B         start of the prime search for orders 2 and 3      (131072,262144)
  --row-width N       values per table row                              (64)
  --threads N         threads                                           (all cores)
  --seed N            seed of table, weights and incoming streams       (0)
  --train-steps N     steps of 2048 tokens, 0 for no training           (300)
  --help              this text
TEXT
}
fail() { echo "demo.sh: $*" >&2; exit 2; }
step() { echo "==> $*"; }
number_of() {
  [[ $value =~ ^[0-9]{1,7}$ ]] || fail "$option: expected a number of $1, got '$value'"
}
from_start() { case $1 in /*) echo "$1" ;; *) echo "$start_folder/$1" ;; esac; }

text="" out=.demo sizes=131072,262144 row_width=64 dense=32768
sublayers=24 stack_tokens=4096 train_steps=300 step_tokens=2048
every=() pipeline=()  # options of the program's commands: of all of them, of pipeline alone
while (($#)); do
  option=$1
  case $option in -h|--help) usage; exit 0 ;; esac
  case $option in
    --text|--out|--tokens|--dense-tokens|--width|--streams|--sizes|--row-width|--threads|--seed|--train-steps|--sublayers|--stack-tokens)
      (($# >= 2)) || fail "$option: expected a value, got none"
      value=$2; shift 2 ;;
    *) fail "unknown option '$option'; see ./demo.sh --help" ;;
  esac
  case $option in
    --text) text=$(from_start "$value") ;;
    --out) out=$(from_start "$value") ;;
    --sizes) sizes=$value ;;
    --row-width) row_width=$value ;;
    --dense-tokens) dense=$value ;;
    --train-steps) number_of steps; train_steps=$value ;;
    --sublayers) number_of sublayers; sublayers=$value ;;
    --stack-tokens) number_of tokens; stack_tokens=$value ;;
    --threads|--seed) every+=("$option" "$value") ;;
    *) pipeline+=("$option" "$value") ;;
  esac
done
if [[ -n $text ]]; then
  [[ -f $text ]] || fail "--text: $text is not a file"
  [[ -r $text ]] || fail "--text: $text cannot be read"
  [[ -s $text ]] || fail "--text: $text is empty"
fi
mkdir -p "$out" 2>/dev/null && [[ -w $out ]] || fail "--out: the folder $out cannot be written"

step "packages"
tools/install_dependencies.sh demo
tools/python_environment.sh
python=$PWD/.venv/bin/python

step "build"
log=$out/build.log
show_log() {
  { grep -E 'error|FAILED' "$log" || tail -n 30 "$log"; } | head -n 30 >&2
  fail "the build failed (above; whole log: $log)"
}
cmake --preset cpu >"$log" 2>&1 || show_log
if [[ -t 1 ]]; then  # ninja's own one-line progress
  NINJA_STATUS='    [%f/%t] ' cmake --build --preset cpu --target ehc_program 2>>"$log" || show_log
else
  cmake --build --preset cpu --target ehc_program >>"$log" 2>&1 || show_log
fi
ehc=$PWD/build/cpu/bin/ehc

step "text and token ids"
if [[ -n $text ]]; then
  title=$(basename "$text")
  "$python" demo/read_text.py "$out/text.txt" --text "$text"
else
  title="King James Bible"
  "$python" demo/read_text.py "$out/text.txt"
fi
ids=$("$python" demo/encode_text.py "$out/text.txt" "$out")

step "token map and table layout"
tokenizer=$("$python" demo/v4_tokenizer.py)
map=$out/v4.tokmap
if ! "$ehc" tokmap verify "$map" --tokenizer "$tokenizer" >/dev/null 2>&1; then
  "$ehc" tokmap build "$tokenizer" -o "$map"
fi
vocabulary=$("$ehc" tokmap show "$map" --json |
  "$python" -c 'import json, sys; print(json.load(sys.stdin)["compressed_vocab_size"])')
"$ehc" layout show --preset demo --sizes "$sizes" --row-width "$row_width" \
  --compressed-vocab "$vocabulary" -o "$out/layout.safetensors" >"$out/layout.txt"

step "from ids to streams"
status=0
stack=1
[[ $sublayers =~ ^0+$ || $stack_tokens =~ ^0+$ || $dense =~ ^0+$ ]] && stack=0
if ((stack)); then
  pipeline+=(--save-streams "$out/streams.safetensors" --saved-tokens "$stack_tokens")
fi
"$ehc" pipeline --ids "$ids" --map "$map" --layout "$out/layout.safetensors" \
  --dense-tokens "$dense" "${every[@]}" "${pipeline[@]}" --json "$out/figures.json" >"$out/stages.txt" || status=$?
((status <= 1)) || exit "$status"
results=("$out/figures.json" "$ids")

step "through mHC sublayers"
if ((stack)); then
  stack_status=0
  "$ehc" streams --in "$out/streams.safetensors" --sublayers "$sublayers" "${every[@]}" \
    --out "$out/stack.safetensors" --json "$out/stack.json" >"$out/stack.txt" || stack_status=$?
  ((stack_status <= 1)) || exit "$stack_status"
  status=$((status | stack_status))
  results+=(--stack "$out/stack.json")
else
  echo "    not wanted"
fi

tokens=$("$python" -c 'import json, sys
print(json.load(open(sys.argv[1]))["configuration"]["tokens"])' "$out/figures.json")
step "training"
train() {
  "$ehc" train --ids "$ids" --map "$map" --layout "$out/training-layout.safetensors" \
    --text-tokens "$tokens" --tokens "$step_tokens" --steps "$train_steps" "${every[@]}" \
    --checkpoint "$out/training.safetensors" --json "$out/training.json" "$@" >"$out/training.txt"
}
if ((10#$train_steps == 0)); then
  echo "    not wanted"
elif ((tokens <= step_tokens)); then
  echo "    left out: the text has $tokens tokens, and one step takes $step_tokens"
else
  "$ehc" layout show --preset demo --sizes 16384,32768 --row-width 16 \
    --compressed-vocab "$vocabulary" -o "$out/training-layout.safetensors" >"$out/training-layout.txt"
  trained=0
  train || trained=$?
  if ((trained == 3 || trained == 4)) && [[ -f $out/training.safetensors ]]; then
    echo "    from the first step, then"  # the checkpoint was of other settings, or damaged
    train --restart
  elif ((trained > 0)); then
    exit "$trained"
  fi
  results+=(--training "$out/training.json")
fi

"$python" demo/summary.py "${results[@]}" --title "$title"
"$python" demo/report.py "${results[@]}" --title "$title" "$out/report.html"
echo
echo "Report: $out/report.html"
exit "$status"
