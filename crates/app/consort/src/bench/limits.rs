//! The upper limit of tokens per second on a machine. Every step reads all weights once and multiplies with each of them, so
//! memory bandwidth and arithmetic each set a limit. The lower one counts.

use std::fmt;

use kernels::BackendError;
use kernels::cpu::Level;
use kernels::probe::{self, Rate};
use model::{Description, FeedForward};

/// The measured peak rates of this machine, for a number of threads.
#[derive(Clone, Copy, Debug)]
pub struct Machine {
    pub read: Rate,
    pub int8: Rate,
    pub bf16: Rate,
    pub f32: Rate,
}

impl Machine {
    pub fn measure(threads: usize, level: Level) -> Self {
        Self {
            read: probe::read_bandwidth(threads),
            int8: probe::int8_peak(threads, level),
            bf16: probe::bf16_peak(threads, level),
            f32: probe::f32_peak(threads, level),
        }
    }
}

/// The part of the machine's arithmetic that the int8 kernel reaches at least if its functions are inlined; it reaches 0.26 to
/// 0.55, and 0.11 if they are not.
const INLINED_KERNEL_MIN: f64 = 0.18;

/// What is wrong with this build, if its kernels reach so little of the machine's arithmetic that they cannot be inlined.
pub fn build_fault(level: Level) -> Result<Option<String>, BackendError> {
    // A matrix that is small enough to be measured quickly says nothing of tiles.
    let level = level.min(Level::Avx512);
    let share = probe::int8_product(level)?.best / probe::int8_peak(1, level).best;
    // The loop that measures plain code is not made of the instructions that its kernel uses.
    if level == Level::Scalar || share >= INLINED_KERNEL_MIN {
        return Ok(None);
    }
    Ok(Some(format!(
        "this build is slow: its int8 kernel reaches {:.0} % of what the {level} instructions of this CPU do; build with \
         `--release`, whose profile in Cargo.toml compiles `kernels` as one codegen unit",
        100.0 * share
    )))
}

impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (read, tera) = (self.read.best / 1e9, |rate: Rate| rate.best / 1e12);
        write!(f, "reads {read:.1} GB/s, int8 {:.2} TOP/s, ", tera(self.int8))?;
        write!(f, "bf16 {:.2} TFLOP/s, f32 {:.2} TFLOP/s", tera(self.bf16), tera(self.f32))
    }
}

/// The resource that limits a test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bottleneck {
    Reads,
    Int8,
    Bf16,
    F32,
}

impl Bottleneck {
    pub fn name(self) -> &'static str {
        match self {
            Self::Reads => "reads",
            Self::Int8 => "int8",
            Self::Bf16 => "bf16",
            Self::F32 => "f32",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Limit {
    pub tokens_per_s: f64,
    pub bound: Bottleneck,
}

/// The cost of one token. For a mixture of experts: of the experts that one token uses. A batch may use more experts and
/// read more.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TokenCost {
    layer_parameters: f64,
    layer_bytes: f64,
    head_parameters: f64,
    head_bytes: f64,
    /// Bytes of the KV cache for one token, in all layers.
    position_bytes: f64,
    arithmetic: Bottleneck,
}

impl TokenCost {
    /// `layer_bytes` and `head_bytes` are sizes in memory. `kv_element_bytes` is the size of an element of the KV cache.
    pub fn new(description: &Description, layer_bytes: usize, head_bytes: usize, kv_element_bytes: usize) -> Self {
        let Description { hidden, heads, kv_heads, head_dim, vocab, .. } = *description;
        let attention = hidden * head_dim * (2 * heads + 2 * kv_heads);
        let (mut held, mut used) = (0.0, 0.0);
        for layer in &description.layers {
            let (all, chosen) = match layer.feed_forward {
                FeedForward::Dense { inner } => (3 * hidden * inner, 3 * hidden * inner),
                FeedForward::Experts { inner, routing } => {
                    let (router, expert) = (hidden * routing.experts, 3 * hidden * inner);
                    (router + routing.experts * expert, router + routing.chosen * expert)
                }
            };
            held += (attention + all) as f64;
            used += (attention + chosen) as f64;
        }
        let bits = 8.0 * layer_bytes as f64 / held;
        Self {
            layer_parameters: used,
            layer_bytes: layer_bytes as f64 * used / held,
            head_parameters: (vocab * hidden) as f64,
            head_bytes: head_bytes as f64,
            position_bytes: (description.layers.len() * 2 * kv_heads * head_dim * kv_element_bytes) as f64,
            // The average bits per weight tell the arithmetic: quantised weights are multiplied as integers.
            arithmetic: match bits {
                ..14.0 => Bottleneck::Int8,
                ..24.0 => Bottleneck::Bf16,
                _ => Bottleneck::F32,
            },
        }
    }

    /// The limit for a prompt that is computed in chunks. Attention is not counted, nor the head, which runs once per
    /// prompt.
    pub fn prefill(&self, machine: &Machine, chunk: usize) -> Limit {
        let reads = chunk as f64 * machine.read.best / self.layer_bytes;
        self.lower(reads, self.layer_parameters, machine)
    }

    /// The limit for `batch` sequences that decode one token per step, with `context` tokens each on average.
    pub fn decode(&self, machine: &Machine, batch: usize, context: f64) -> Limit {
        let bytes = self.layer_bytes + self.head_bytes + batch as f64 * context * self.position_bytes;
        let reads = batch as f64 * machine.read.best / bytes;
        self.lower(reads, self.layer_parameters + self.head_parameters, machine)
    }

    /// Minimum bytes that a step reads.
    pub fn weight_bytes(&self) -> f64 {
        self.layer_bytes + self.head_bytes
    }

    fn lower(&self, reads: f64, parameters: f64, machine: &Machine) -> Limit {
        let peak = match self.arithmetic {
            Bottleneck::Int8 => machine.int8,
            Bottleneck::Bf16 => machine.bf16,
            Bottleneck::F32 | Bottleneck::Reads => machine.f32,
        };
        let arithmetic = peak.best / (2.0 * parameters);
        match reads < arithmetic {
            true => Limit { tokens_per_s: reads, bound: Bottleneck::Reads },
            false => Limit { tokens_per_s: arithmetic, bound: self.arithmetic },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine() -> Machine {
        let rate = |best| Rate { best, median: best };
        Machine { read: rate(30e9), int8: rate(10e12), bf16: rate(5e12), f32: rate(0.3e12) }
    }

    /// 100 million parameters in the layers, 10 million in the head.
    fn cost(bytes_each: f64, arithmetic: Bottleneck) -> TokenCost {
        TokenCost {
            layer_parameters: 100e6,
            layer_bytes: 100e6 * bytes_each,
            head_parameters: 10e6,
            head_bytes: 10e6 * bytes_each,
            position_bytes: 1e6,
            arithmetic,
        }
    }

    #[track_caller]
    fn check(limit: Limit, tokens_per_s: f64, bound: Bottleneck) {
        assert!((limit.tokens_per_s / tokens_per_s - 1.0).abs() < 1e-9, "{limit:?}");
        assert_eq!(limit.bound, bound);
    }

    #[test]
    fn decode_of_one_sequence_reads_all_weights_and_its_cache_for_each_token() {
        check(cost(1.0, Bottleneck::Int8).decode(&machine(), 1, 0.0), 30e9 / 110e6, Bottleneck::Reads);
        check(cost(1.0, Bottleneck::Int8).decode(&machine(), 1, 40.0), 30e9 / 150e6, Bottleneck::Reads);
    }

    #[test]
    fn a_batch_shares_the_reading_of_weights_but_not_of_caches() {
        check(cost(1.0, Bottleneck::Int8).decode(&machine(), 8, 10.0), 8.0 * 30e9 / 190e6, Bottleneck::Reads);
    }

    #[test]
    fn a_long_prompt_is_bound_by_the_arithmetic_of_its_weights() {
        check(cost(1.0, Bottleneck::Int8).prefill(&machine(), 512), 10e12 / 200e6, Bottleneck::Int8);
        check(cost(2.0, Bottleneck::Bf16).prefill(&machine(), 512), 5e12 / 200e6, Bottleneck::Bf16);
        check(cost(4.0, Bottleneck::F32).prefill(&machine(), 512), 0.3e12 / 200e6, Bottleneck::F32);
    }

    #[test]
    fn a_prompt_of_one_token_is_bound_by_reads() {
        check(cost(1.0, Bottleneck::Int8).prefill(&machine(), 1), 30e9 / 100e6, Bottleneck::Reads);
    }
}
