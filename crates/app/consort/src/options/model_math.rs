//! The default arithmetic of a model with quantised weights: exact where that was measured to be fast enough. The table is in
//! `docs/performance.md`, the figures in `bench/results.md`.

use kernels::cpu::{DecodeMath, Level, PrefillMath};
use model::Checkpoint;
use types::DType;

/// The arithmetic of both roles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModelMath {
    pub decode: DecodeMath,
    pub prompt: PrefillMath,
}

impl ModelMath {
    const FASTEST: Self = Self { decode: DecodeMath::Int8, prompt: PrefillMath::Bf16 };

    /// The default of a model on a level. `keep` is the format that weights are converted to at load, if they are.
    pub fn of(checkpoint: &Checkpoint, keep: Option<DType>, level: Level) -> Self {
        let most_bytes = || checkpoint.stored_formats().first().map(|stored| stored.dtype);
        keep.or_else(most_bytes).map_or(Self::FASTEST, |format| Self::of_format(format, level))
    }

    /// The default for the format that most of the weights have.
    fn of_format(format: DType, level: Level) -> Self {
        use DType::{Q3_K, Q4_0, Q4_1, Q4_K, Q5_1, Q6_K, Q8_0};
        if !format.is_quantised() {
            return Self::FASTEST;
        }
        Self {
            // Exact decode of one sequence reaches at least 0.95 of the speed of int8. With AMX it was not measured.
            decode: match (level, format) {
                (Level::Avx512, Q3_K | Q4_0 | Q4_1 | Q4_K | Q5_1 | Q6_K | Q8_0) => DecodeMath::Exact,
                _ => DecodeMath::Int8,
            },
            // Exact prefill is at least twice as fast as llama.cpp's.
            prompt: match (level, format) {
                (Level::Avx512, Q4_1 | Q6_K) => PrefillMath::Exact,
                _ => PrefillMath::Bf16,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_main_format_and_the_level_decide() {
        let of = |format, level| ModelMath::of_format(format, level);
        assert_eq!(of(DType::BF16, Level::Avx512), ModelMath::FASTEST);
        assert_eq!(of(DType::Q4_1, Level::Avx512).prompt, PrefillMath::Exact);
        assert_eq!(of(DType::Q4_K, Level::Avx512).prompt, PrefillMath::Bf16);
        assert_eq!(of(DType::Q4_1, Level::Amx).prompt, PrefillMath::Bf16);
        assert_eq!(of(DType::Q8_0, Level::Avx512).decode, DecodeMath::Exact);
        assert_eq!(of(DType::Q8_0, Level::Avx2).decode, DecodeMath::Int8);
    }
}
