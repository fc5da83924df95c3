//! `CpuOptions`: how the CPU backend computes, and the arithmetic of each role of rows with quantised weights.

use super::attention::KvType;
use super::level::Level;

#[derive(Clone, Copy, Debug)]
pub struct CpuOptions {
    pub threads: usize,
    pub level: Level,
    pub kv: KvType,
    pub decode: DecodeMath,
    pub prompt: PrefillMath,
}

/// The arithmetic of decode rows with quantised weights. All levels give bit-identical results.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DecodeMath {
    /// Activations are rounded to int8 in two parts, which keep 16 bits: as exact as f32, up to the rounding of sums.
    #[default]
    Exact,
    /// Activations are rounded to int8.
    Int8,
}

/// The arithmetic of prefill rows with quantised weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PrefillMath {
    /// As [`DecodeMath::Exact`].
    Exact,
    /// Rows and weights are rounded to bf16 and multiplied with AMX tiles: faster than `Int8`, and closer to the exact
    /// product. CPUs without AMX use `Int8`.
    #[default]
    Bf16,
    /// As [`DecodeMath::Int8`].
    Int8,
}

/// How rows of one role are multiplied with quantised weights on one level.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RowMath {
    /// Rounded to bf16, on tiles.
    Bf16,
    /// Rounded to int8 in this many parts.
    Int8 { parts: usize },
}

impl Default for CpuOptions {
    /// All cores, the highest level, an f32 KV cache, and the default arithmetic.
    fn default() -> Self {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let (decode, prompt) = (DecodeMath::default(), PrefillMath::default());
        Self { threads, level: Level::detect(), kv: KvType::F32, decode, prompt }
    }
}

impl CpuOptions {
    /// The same on another level. A type of the KV cache that the level does not support becomes the nearest one that it does.
    pub fn at(self, level: Level) -> Self {
        Self { level, kv: self.kv.nearest_on(level), ..self }
    }

    pub(super) fn decode_math(&self) -> RowMath {
        match self.decode {
            DecodeMath::Exact => RowMath::EXACT,
            DecodeMath::Int8 => RowMath::Int8 { parts: 1 },
        }
    }

    pub(super) fn prefill_math(&self) -> RowMath {
        match self.prompt {
            PrefillMath::Exact => RowMath::EXACT,
            PrefillMath::Bf16 if self.level == Level::Amx => RowMath::Bf16,
            PrefillMath::Bf16 | PrefillMath::Int8 => RowMath::Int8 { parts: 1 },
        }
    }
}

impl RowMath {
    const EXACT: Self = Self::Int8 { parts: 2 };

    /// The int8 parts of a row; one for bf16, which has no int8 layout.
    pub(super) fn parts(self) -> usize {
        match self {
            Self::Bf16 => 1,
            Self::Int8 { parts } => parts,
        }
    }
}
