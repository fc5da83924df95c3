//! What a rank has to load, and how to run it, in the line protocol.

use std::path::PathBuf;

use kernels::StepLimits;
use kernels::cpu::{CpuOptions, DecodeMath, KvType, Level, PrefillMath};
use model::LoadOptions;
use serde::{Deserialize, Serialize};
use types::{DType, LayerRange};

use super::limits::{ENTRIES_MAX, LimitError, PAGES_MAX, POSITIONS_MAX, ROWS_MAX, THREADS_MAX, count};

/// A rank's shard of a model. The rank determines which part it loads.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardSpec {
    /// A folder or a GGUF file, absolute. With `tensors`, a file with a [`model::Manifest`].
    pub path: String,
    /// A folder with the manifest's tensors, one file each, named by their hashes. Absolute.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tensors: Option<String>,
    /// Only these layers, without embedding and head: the ranks share a stage of a chain.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layers: Option<WireLayers>,
    /// The format to keep weights in: see [`LoadOptions::keep`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub keep: Option<String>,
    pub cpu: WireCpuOptions,
    pub limits: WireLimits,
}

/// See [`LayerRange`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WireLayers {
    pub start: u32,
    pub end: u32,
}

/// See [`CpuOptions`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WireCpuOptions {
    pub threads: u64,
    pub level: CpuLevel,
    pub kv: WireKvType,
    pub decode: WireDecodeMath,
    pub prompt: WirePrefillMath,
}

/// See [`Level`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CpuLevel {
    Scalar,
    Avx2,
    Avx512,
    Amx,
}

/// See [`KvType`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WireKvType {
    F32,
    F16,
    Bf16,
    Split,
}

/// See [`DecodeMath`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WireDecodeMath {
    Exact,
    Int8,
}

/// See [`PrefillMath`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WirePrefillMath {
    Exact,
    Bf16,
    Int8,
}

/// See [`model::Limits`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WireLimits {
    pub rows: u64,
    pub sequences: u64,
    pub pages: u64,
    pub logit_rows: u64,
    pub kv_pages: u64,
    pub positions: u64,
}

impl ShardSpec {
    pub fn new(path: String, options: &LoadOptions, cpu: CpuOptions) -> Self {
        let LoadOptions { keep, limits } = *options;
        Self {
            path,
            tensors: None,
            layers: None,
            keep: keep.map(|format| format.name().to_owned()),
            cpu: WireCpuOptions {
                threads: cpu.threads as u64,
                level: cpu.level.into(),
                kv: cpu.kv.into(),
                decode: cpu.decode.into(),
                prompt: cpu.prompt.into(),
            },
            limits: WireLimits::from(&limits),
        }
    }

    /// The same for a stage of a chain: only these layers, without embedding and head.
    pub fn with_layers(self, layers: LayerRange) -> Self {
        Self { layers: Some(WireLayers { start: layers.start() as u32, end: layers.end() as u32 }), ..self }
    }

    /// The same for a manifest at `path`, whose tensors are in this folder.
    pub fn with_tensors(self, folder: String) -> Self {
        Self { tensors: Some(folder), ..self }
    }

    pub fn path(&self) -> PathBuf {
        PathBuf::from(&self.path)
    }

    /// The layers of a stage; `None`: the whole model.
    pub fn layers(&self) -> Result<Option<LayerRange>, LimitError> {
        let range = |WireLayers { start, end }| LayerRange::new(start, end).ok_or(LimitError::Zero { what: "layers" });
        self.layers.map(range).transpose()
    }

    pub fn options(&self) -> Result<LoadOptions, LimitError> {
        let format = |name: &String| name.parse::<DType>().map_err(|_| LimitError::Format);
        Ok(LoadOptions { keep: self.keep.as_ref().map(format).transpose()?, limits: self.limits.checked()? })
    }
}

impl WireCpuOptions {
    pub fn options(&self) -> Result<CpuOptions, LimitError> {
        let threads = count("threads", self.threads, THREADS_MAX)?;
        if threads == 0 {
            return Err(LimitError::Zero { what: "threads" });
        }
        let (decode, prompt) = (self.decode.into(), self.prompt.into());
        Ok(CpuOptions { threads, level: self.level.into(), kv: self.kv.into(), decode, prompt })
    }
}

impl From<&model::Limits> for WireLimits {
    fn from(limits: &model::Limits) -> Self {
        Self {
            rows: limits.step.rows as u64,
            sequences: limits.step.sequences as u64,
            pages: limits.step.pages as u64,
            logit_rows: limits.logit_rows as u64,
            kv_pages: limits.kv_pages as u64,
            positions: limits.positions as u64,
        }
    }
}

impl WireLimits {
    /// Checks every limit.
    pub fn checked(&self) -> Result<model::Limits, LimitError> {
        let step = StepLimits {
            rows: count("rows", self.rows, ROWS_MAX)?,
            sequences: count("sequences", self.sequences, ENTRIES_MAX)?,
            pages: count("pages of a step", self.pages, PAGES_MAX)?,
        };
        let limits = model::Limits {
            step,
            logit_rows: count("rows with logits", self.logit_rows, ROWS_MAX)?,
            kv_pages: count("pages", self.kv_pages, PAGES_MAX)?,
            positions: count("positions", self.positions, POSITIONS_MAX)?,
        };
        for (what, value) in [
            ("rows", step.rows),
            ("sequences", step.sequences),
            ("pages of a step", step.pages),
            ("rows with logits", limits.logit_rows),
            ("pages", limits.kv_pages),
            ("positions", limits.positions),
        ] {
            if value == 0 {
                return Err(LimitError::Zero { what });
            }
        }
        Ok(limits)
    }
}

/// Converts both ways between an enum of the protocol and one of the kernels with the same variants.
macro_rules! same_names {
    ($($wire:ident = $inner:ident { $($name:ident),* })*) => {$(
        impl From<$inner> for $wire {
            fn from(value: $inner) -> Self {
                match value {
                    $($inner::$name => Self::$name),*
                }
            }
        }

        impl From<$wire> for $inner {
            fn from(value: $wire) -> Self {
                match value {
                    $($wire::$name => Self::$name),*
                }
            }
        }
    )*};
}

same_names! {
    CpuLevel = Level { Scalar, Avx2, Avx512, Amx }
    WireKvType = KvType { F32, F16, Bf16, Split }
    WireDecodeMath = DecodeMath { Exact, Int8 }
    WirePrefillMath = PrefillMath { Exact, Bf16, Int8 }
}
