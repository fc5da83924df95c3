//! The tokens per second that a machine could reach: every step reads the weights once and multiplies with each of
//! them, so memory and arithmetic each set a limit, and the lower one counts.

use std::fmt;

use kernels::cpu::Level;
use kernels::probe::{self, Rate};
use model::{Description, FeedForward};

/// What some threads of this machine reach at most.
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

impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (read, tera) = (self.read.best / 1e9, |rate: Rate| rate.best / 1e12);
        write!(f, "reads {read:.1} GB/s, int8 {:.2} TOP/s, ", tera(self.int8))?;
        write!(f, "bf16 {:.2} TFLOP/s, f32 {:.2} TFLOP/s", tera(self.bf16), tera(self.f32))
    }
}

/// What holds a test back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bound {
    Reads,
    Int8,
    Bf16,
    F32,
}

impl Bound {
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
    pub bound: Bound,
}

/// What one token costs. Of a mixture of experts, those that one token chooses: a batch that chooses others reads more,
/// but need not.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TokenCost {
    layer_parameters: f64,
    layer_bytes: f64,
    head_parameters: f64,
    head_bytes: f64,
    /// Keys and values of one position, in all layers.
    position_bytes: f64,
    arithmetic: Bound,
}

impl TokenCost {
    /// `layer_bytes` and `head_bytes` as the weights are held in memory, `kv_element_bytes` of the K/V cache.
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
            // Which arithmetic suits the weights follows from their size: quantised ones are multiplied as integers.
            arithmetic: match bits {
                ..14.0 => Bound::Int8,
                ..24.0 => Bound::Bf16,
                _ => Bound::F32,
            },
        }
    }

    /// Of a prompt that runs in chunks. The head runs once for the whole prompt, and is not counted; nor is attention.
    pub fn prefill(&self, machine: &Machine, chunk: usize) -> Limit {
        let reads = chunk as f64 * machine.read.best / self.layer_bytes;
        self.lower(reads, self.layer_parameters, machine)
    }

    /// Of `batch` sequences that each take one token per step after `context` tokens on average.
    pub fn decode(&self, machine: &Machine, batch: usize, context: f64) -> Limit {
        let bytes = self.layer_bytes + self.head_bytes + batch as f64 * context * self.position_bytes;
        let reads = batch as f64 * machine.read.best / bytes;
        self.lower(reads, self.layer_parameters + self.head_parameters, machine)
    }

    /// Bytes that a step reads at least.
    pub fn weight_bytes(&self) -> f64 {
        self.layer_bytes + self.head_bytes
    }

    fn lower(&self, reads: f64, parameters: f64, machine: &Machine) -> Limit {
        let peak = match self.arithmetic {
            Bound::Int8 => machine.int8,
            Bound::Bf16 => machine.bf16,
            Bound::F32 | Bound::Reads => machine.f32,
        };
        let arithmetic = peak.best / (2.0 * parameters);
        match reads < arithmetic {
            true => Limit { tokens_per_s: reads, bound: Bound::Reads },
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
    fn cost(bytes_each: f64, arithmetic: Bound) -> TokenCost {
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
    fn check(limit: Limit, tokens_per_s: f64, bound: Bound) {
        assert!((limit.tokens_per_s / tokens_per_s - 1.0).abs() < 1e-9, "{limit:?}");
        assert_eq!(limit.bound, bound);
    }

    #[test]
    fn decode_of_one_sequence_reads_all_weights_and_its_cache_for_each_token() {
        check(cost(1.0, Bound::Int8).decode(&machine(), 1, 0.0), 30e9 / 110e6, Bound::Reads);
        check(cost(1.0, Bound::Int8).decode(&machine(), 1, 40.0), 30e9 / 150e6, Bound::Reads);
    }

    #[test]
    fn a_batch_shares_the_reading_of_weights_but_not_of_caches() {
        check(cost(1.0, Bound::Int8).decode(&machine(), 8, 10.0), 8.0 * 30e9 / 190e6, Bound::Reads);
    }

    #[test]
    fn a_long_prompt_is_bound_by_the_arithmetic_of_its_weights() {
        check(cost(1.0, Bound::Int8).prefill(&machine(), 512), 10e12 / 200e6, Bound::Int8);
        check(cost(2.0, Bound::Bf16).prefill(&machine(), 512), 5e12 / 200e6, Bound::Bf16);
        check(cost(4.0, Bound::F32).prefill(&machine(), 512), 0.3e12 / 200e6, Bound::F32);
    }

    #[test]
    fn a_prompt_of_one_token_is_bound_by_reads() {
        check(cost(1.0, Bound::Int8).prefill(&machine(), 1), 30e9 / 100e6, Bound::Reads);
    }
}
