//! The values of options, and how they are parsed.

use std::num::{NonZeroU16, NonZeroUsize};
use std::thread;
use std::time::Duration;

use anyhow::ensure;
use clap::ValueEnum;
use kernels::cpu::{DecodeMath, Level, PrefillMath};
use ranks::protocol::join::Activations;
use ranks::protocol::limits::RANKS_MAX;
use types::DType;

/// The upper limit of `--threads` per CPU: more threads only wait for each other.
const THREADS_PER_CPU_MAX: usize = 32;

/// The CPUs that this process may use.
pub fn cpus() -> usize {
    thread::available_parallelism().map_or(1, NonZeroUsize::get)
}

/// Parses a number that is not zero.
pub fn positive(text: &str) -> Result<NonZeroUsize, String> {
    text.parse().map_err(|_| "it must be a number from 1 on".to_owned())
}

/// Parses a number of ranks.
pub fn rank_count(text: &str) -> Result<NonZeroU16, String> {
    let count: Option<NonZeroU16> = text.parse().ok();
    let possible = count.filter(|count| usize::from(count.get()) <= RANKS_MAX);
    possible.ok_or_else(|| format!("it must be a number from 1 to {RANKS_MAX}"))
}

/// Parses a number of threads and checks it against the number of CPUs.
pub fn thread_count(text: &str) -> Result<NonZeroUsize, String> {
    let count = positive(text)?;
    let (cpus, max) = (cpus(), cpus().saturating_mul(THREADS_PER_CPU_MAX));
    if count.get() > max {
        return Err(format!("this machine has {cpus} CPUs, which is enough for {max} threads at most"));
    }
    Ok(count)
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum CpuLevelOption {
    #[default]
    Auto,
    Scalar,
    Avx2,
    Avx512,
    Amx,
}

impl CpuLevelOption {
    /// The level that was named, if any.
    pub fn named(self) -> Option<Level> {
        match self {
            Self::Auto => None,
            Self::Scalar => Some(Level::Scalar),
            Self::Avx2 => Some(Level::Avx2),
            Self::Avx512 => Some(Level::Avx512),
            Self::Amx => Some(Level::Amx),
        }
    }

    /// The level to use: the CPU's best, or a lower one that was named.
    pub fn level(self) -> anyhow::Result<Level> {
        let best = Level::detect();
        let level = self.named().unwrap_or(best);
        ensure!(level <= best, "this CPU does not have {level}; the best it has is {best}");
        Ok(level)
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum ComputeOption {
    #[default]
    Auto,
    F32,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum KvOption {
    #[default]
    Auto,
    F32,
    F16,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum DecodeMathOption {
    #[default]
    Auto,
    Exact,
    Int8,
}

impl DecodeMathOption {
    /// The arithmetic that was named, if any.
    pub fn named(self) -> Option<DecodeMath> {
        match self {
            Self::Auto => None,
            Self::Exact => Some(DecodeMath::Exact),
            Self::Int8 => Some(DecodeMath::Int8),
        }
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum PromptMathOption {
    #[default]
    Auto,
    Exact,
    Bf16,
    Int8,
}

impl PromptMathOption {
    /// The arithmetic that was named, if any.
    pub fn named(self) -> Option<PrefillMath> {
        match self {
            Self::Auto => None,
            Self::Exact => Some(PrefillMath::Exact),
            Self::Bf16 => Some(PrefillMath::Bf16),
            Self::Int8 => Some(PrefillMath::Int8),
        }
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum ActivationsOption {
    #[default]
    F32,
    Q8,
}

impl From<ActivationsOption> for Activations {
    fn from(option: ActivationsOption) -> Self {
        match option {
            ActivationsOption::F32 => Self::F32,
            ActivationsOption::Q8 => Self::Q8,
        }
    }
}

pub fn quantisation(name: &str) -> Result<DType, String> {
    const OFFERED: [DType; 5] = [DType::Q8_0, DType::Q6_K, DType::Q5_K, DType::Q4_K, DType::Q4_0];
    let asked = name.parse().ok().filter(|dtype| OFFERED.contains(dtype));
    asked.ok_or_else(|| format!("use {}", OFFERED.map(DType::name).join(", ")))
}

/// Parses a number of bytes with an optional unit, such as `512M`.
pub fn bytes(text: &str) -> Result<u64, String> {
    let (number, unit) = text.split_at(text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len()));
    let shift = match unit.trim().to_ascii_uppercase().trim_end_matches('B').trim_end_matches('I') {
        "" => 0,
        "K" => 10,
        "M" => 20,
        "G" => 30,
        "T" => 40,
        _ => return Err("write it as 512M or 2G".to_owned()),
    };
    let number: u64 = number.parse().map_err(|_| "write it as 512M or 2G".to_owned())?;
    number.checked_mul(1 << shift).ok_or_else(|| "that is more than any machine has".to_owned())
}

/// Parses a time with a unit, such as `90s`, `5m` or `1h`; a number alone is seconds.
pub fn duration(text: &str) -> Result<Duration, String> {
    let wrong = || "write it as 90s, 5m or 1h".to_owned();
    let (number, unit) = text.split_at(text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len()));
    let seconds = match unit {
        "" | "s" => 1,
        "m" => 60,
        "h" => 3600,
        _ => return Err(wrong()),
    };
    let number: u64 = number.parse().map_err(|_| wrong())?;
    number.checked_mul(seconds).map(Duration::from_secs).ok_or_else(wrong)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_written_with_or_without_a_unit() {
        for (text, expected) in [("17", 17), ("2k", 2 << 10), ("512M", 512 << 20), ("2GiB", 2 << 30), ("1 TB", 1 << 40)]
        {
            assert_eq!(bytes(text), Ok(expected), "{text}");
        }
        for text in ["", "G", "-1", "1.5G", "2X", "99999999999T"] {
            assert!(bytes(text).is_err(), "{text}");
        }
    }
}
