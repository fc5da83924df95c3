//! Loads stored tensors as a backend's weights: finds a tensor by its kind, checks its shape against the description, takes
//! the rank's slice without copying, and lets the backend pack it.

use std::io;
use std::ops::Range;
use std::path::PathBuf;

use kernels::{Backend, BackendError, Gated, MatrixSource, StepLimits, quant};
use types::{DType, LayerRange, Rank};

use crate::architecture::{Tensor, WeightKind};
use crate::checkpoint::Checkpoint;
use crate::description::{Description, DescriptionError, FeedForward};
use crate::files::{FileError, TensorView};
use crate::manifest::ManifestError;
use crate::split::{RankShards, RowBlocks, Slice, SplitError, least_common_multiple};
use crate::tensor_names::End;

/// Limits for which buffers are allocated at load.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    pub step: StepLimits,
    /// The largest number of rows of one step whose logits are computed.
    pub logit_rows: usize,
    /// Pages of the KV cache, in each layer.
    pub kv_pages: usize,
    /// The largest number of positions of one sequence.
    pub positions: usize,
}

#[derive(Clone, Copy, Debug)]
pub struct LoadOptions {
    /// The format in which linear weights are kept: f32, or a format to which f32, f16 and bf16 weights are converted. `None`
    /// keeps the stored format.
    pub keep: Option<DType>,
    pub limits: Limits,
}

#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    #[error("open {}", path.display())]
    Open { path: PathBuf, source: io::Error },
    #[error("{} has no config.json: a model is a folder with config.json and safetensors, or a .gguf file", folder.display())]
    NoConfig { folder: PathBuf },
    #[error("{} has no config.json but GGUF files: name one of them, such as {file}", folder.display())]
    FolderOfGguf { folder: PathBuf, file: String },
    #[error("{} is one file of a model: name the folder that holds it", path.display())]
    FileOfFolder { path: PathBuf },
    #[error("{} is too large to be a config.json", path.display())]
    ConfigTooLarge { path: PathBuf },
    #[error("{} is not valid JSON", path.display())]
    ConfigSyntax { path: PathBuf, source: serde_json::Error },
    #[error(transparent)]
    Description(#[from] DescriptionError),
    #[error(transparent)]
    File(#[from] FileError),
    #[error(transparent)]
    Manifest(#[from] ManifestError),
    #[error("open the file of tensor {tensor}")]
    TensorFile { tensor: String, source: io::Error },
    #[error("the file of tensor {tensor} has {found} bytes, not {expected}")]
    TensorLength { tensor: String, found: u64, expected: u64 },
    #[error("tensor {tensor} belongs to another part of the model than the one that was opened")]
    NotOpened { tensor: String },
    #[error(transparent)]
    Split(#[from] SplitError),
    #[error("tensor {tensor} is missing")]
    Missing { tensor: String },
    #[error("tensor {tensor} has the shape {found:?}, not {expected:?}")]
    Shape { tensor: String, expected: Vec<usize>, found: Vec<usize> },
    #[error("tensor {tensor} is a bias that {architecture} has no place for")]
    Bias { tensor: String, architecture: &'static str },
    #[error("tensor {tensor} has rows of {cols} elements, which {keep} cannot hold: it needs a multiple of {}", keep.block_elements())]
    Format { tensor: String, cols: usize, keep: DType },
    #[error("tensor {tensor} is stored as {stored} and cannot be turned into {keep}")]
    Requantise { tensor: String, stored: DType, keep: DType },
    #[error("layers {layers} were asked for; the model has {count}")]
    Layers { layers: LayerRange, count: usize },
    #[error("{positions} positions were asked for; the model is made for {max}")]
    Positions { positions: usize, max: usize },
    #[error("load {tensor}")]
    Tensor { tensor: String, source: BackendError },
    #[error("allocate working memory")]
    Memory(#[from] BackendError),
}

/// Reads the weights of one rank.
pub(crate) struct Loader<'a, B: Backend> {
    backend: &'a B,
    checkpoint: &'a Checkpoint,
    keep: Option<DType>,
    pub shards: RankShards,
    /// Bytes of all matrices packed so far.
    pub weight_bytes: usize,
}

/// Slices of stored matrices, to be packed as one matrix, stacked along their rows. Their bytes have not been read yet.
pub(crate) struct Stack<'a> {
    /// The name of the first tensor, for error messages.
    name: String,
    pub sources: Vec<MatrixSource<'a>>,
}

/// A stored matrix, or one expert's matrix in a tensor that holds all experts.
struct Matrix<'a> {
    name: String,
    dtype: DType,
    shape: [usize; 2],
    bytes: &'a [u8],
}

impl<'a, B: Backend> Loader<'a, B> {
    pub fn new(
        backend: &'a B,
        checkpoint: &'a Checkpoint,
        options: &LoadOptions,
        rank: Rank,
    ) -> Result<Self, LoadError> {
        let description = checkpoint.description();
        let LoadOptions { keep, limits } = *options;
        if limits.positions > description.positions_max {
            return Err(LoadError::Positions { positions: limits.positions, max: description.positions_max });
        }
        let shards = RankShards::new(description, row_blocks(checkpoint, keep, rank)?, rank)?;
        Ok(Self { backend, checkpoint, keep, shards, weight_bytes: 0 })
    }

    /// A norm's weight, including the offset; `None` if the architecture does not have this norm.
    pub fn norm(&self, layer: usize, role: WeightKind) -> Result<Option<B::Vector>, LoadError> {
        let description = self.checkpoint.description();
        let Some(tensor) = description.architecture.tensor(role) else { return Ok(None) };
        let name = self.checkpoint.layer_name(layer, tensor);
        self.vector(&name, shape_of(description, role, 0)[0], description.norm_offset).map(Some)
    }

    pub fn final_norm(&self) -> Result<B::Vector, LoadError> {
        let description = self.checkpoint.description();
        self.vector(&self.checkpoint.global_name(End::Norm), description.hidden, description.norm_offset)
    }

    /// The rank's slices of several matrices, stacked.
    pub fn linear(&self, layer: usize, roles: &[WeightKind], inner: usize) -> Result<Stack<'a>, LoadError> {
        let parts = roles.iter().map(|role| self.find(layer, *role, inner, None)).collect::<Result<Vec<_>, _>>()?;
        let sources = roles.iter().zip(&parts).map(|(role, part)| {
            let tensor = self.listed(*role);
            self.refuse_bias(&part.name, tensor)?;
            part.source(&self.shards.slice(tensor.split, part.shape), self.keep_of(part)?)
        });
        Ok(Stack { sources: sources.collect::<Result<_, _>>()?, name: parts[0].name.clone() })
    }

    /// The rank's slices of several biases, concatenated; `None` if the architecture does not have these biases.
    pub fn bias(&self, layer: usize, roles: &[WeightKind]) -> Result<Option<B::Vector>, LoadError> {
        let description = self.checkpoint.description();
        let (mut values, mut last) = (Vec::new(), String::new());
        for role in roles {
            let Some(tensor) = description.architecture.tensor(*role) else { return Ok(None) };
            last = self.checkpoint.layer_name(layer, tensor);
            let all = self.values(&last, shape_of(description, *role, 0)[0])?;
            let slice = self.shards.slice(tensor.split, [all.len(), 1]);
            values.extend_from_slice(&all[slice.rows]);
        }
        self.backend.vector(&values).map(Some).map_err(|source| LoadError::Tensor { tensor: last, source })
    }

    /// The router. It is kept in f32, because it is small and decides which experts run.
    pub fn router(&self, layer: usize) -> Result<Stack<'a>, LoadError> {
        let part = self.find(layer, WeightKind::Router, 0, None)?;
        Ok(Stack { sources: vec![part.source(&part.whole(), DType::F32)?], name: part.name })
    }

    /// The weights of one of the rank's experts.
    pub fn expert(&self, layer: usize, inner: usize, expert: usize) -> Result<Gated<Stack<'a>>, LoadError> {
        let gate_up = self.expert_stack(layer, &[WeightKind::ExpertGate, WeightKind::ExpertUp], inner, expert)?;
        let down = self.expert_stack(layer, &[WeightKind::ExpertDown], inner, expert)?;
        Ok(Gated { gate_up, down })
    }

    /// The rank's rows of the embedding or the head, in the format of `keep` if a row is whole blocks of it, else as stored.
    pub fn table(&self, end: End) -> Result<Stack<'a>, LoadError> {
        let Description { vocab, hidden, .. } = *self.checkpoint.description();
        let name = self.checkpoint.global_name(end);
        let view = self.stored(&name)?;
        expect(&name, view.shape, &[vocab, hidden])?;
        let part = Matrix { name, dtype: view.dtype, shape: [vocab, hidden], bytes: view.bytes };
        let is_stored = matches!(end, End::Embedding) && self.checkpoint.has_embedding_as_stored();
        let keep = if is_stored { part.dtype } else { self.keep_of(&part)? };
        let keep = if keep.row_bytes(hidden).is_some() { keep } else { part.dtype };
        let own = Slice { rows: self.shards.vocab.clone(), cols: 0..hidden };
        Ok(Stack { sources: vec![part.source(&own, keep)?], name: part.name })
    }

    fn expert_stack(
        &self,
        layer: usize,
        roles: &[WeightKind],
        inner: usize,
        expert: usize,
    ) -> Result<Stack<'a>, LoadError> {
        let find = |role: &WeightKind| self.find(layer, *role, inner, Some(expert));
        let parts = roles.iter().map(find).collect::<Result<Vec<_>, _>>()?;
        let sources = parts.iter().map(|part| part.source(&part.whole(), self.keep_of(part)?));
        Ok(Stack { sources: sources.collect::<Result<_, _>>()?, name: parts[0].name.clone() })
    }

    /// Reads and packs a stack.
    pub fn pack(&mut self, Stack { name, sources }: Stack<'_>) -> Result<B::Matrix, LoadError> {
        let matrix = self.backend.matrix(&sources).map_err(|source| LoadError::Tensor { tensor: name, source })?;
        self.checkpoint.check_of(sources.iter().map(|source| source.bytes))?;
        self.weight_bytes += self.backend.matrix_bytes(&matrix);
        // Drop the file's pages, so that packed weights are not resident twice.
        self.checkpoint.release_of(sources.iter().map(|source| source.bytes));
        Ok(matrix)
    }

    fn find(
        &self,
        layer: usize,
        role: WeightKind,
        inner: usize,
        expert: Option<usize>,
    ) -> Result<Matrix<'a>, LoadError> {
        let description = self.checkpoint.description();
        let name = self.checkpoint.layer_name(layer, self.listed(role));
        let shape @ [rows, cols] = shape_of(description, role, inner);
        let (Some(expert), false) = (expert, name.contains("{}")) else {
            let name = expert.map_or_else(|| name.clone(), |expert| name.replace("{}", &expert.to_string()));
            let view = self.stored(&name)?;
            expect(&name, view.shape, &shape)?;
            return Ok(Matrix { name, dtype: view.dtype, shape, bytes: view.bytes });
        };
        let FeedForward::Experts { routing, .. } = description.layers[layer].feed_forward else {
            unreachable!("only layers with experts load experts");
        };
        let view = self.stored(&name)?;
        expect(&name, view.shape, &[routing.experts, rows, cols])?;
        let each = view.bytes.len() / routing.experts;
        Ok(Matrix { name, dtype: view.dtype, shape, bytes: &view.bytes[expert * each..][..each] })
    }

    fn listed(&self, role: WeightKind) -> &'static Tensor {
        self.checkpoint.description().architecture.tensor(role).expect("every architecture has these roles")
    }

    /// Refuses a file that has a bias which the architecture would not add, because its results would be wrong.
    fn refuse_bias(&self, weight: &str, tensor: &Tensor) -> Result<(), LoadError> {
        let architecture = self.checkpoint.description().architecture;
        let bias = |name: &str| name.strip_suffix(".weight").map(|stem| format!("{stem}.bias"));
        let (Some(stored), Some(hf)) = (bias(weight), bias(tensor.hf)) else { return Ok(()) };
        let known = architecture.tensors.iter().any(|other| other.hf == hf);
        match !known && self.checkpoint.has_tensor(&stored)? {
            true => Err(LoadError::Bias { tensor: stored, architecture: architecture.name }),
            false => Ok(()),
        }
    }

    fn keep_of(&self, part: &Matrix<'_>) -> Result<DType, LoadError> {
        let stored = part.dtype;
        match self.keep {
            None => Ok(stored),
            Some(keep) if keep == stored || keep == DType::F32 => Ok(keep),
            Some(keep) if !stored.is_quantised() && (!keep.is_quantised() || quant::can_quantise(keep)) => Ok(keep),
            Some(keep) => Err(LoadError::Requantise { tensor: part.name.clone(), stored, keep }),
        }
    }

    fn vector(&self, name: &str, len: usize, offset: f32) -> Result<B::Vector, LoadError> {
        let mut values = self.values(name, len)?;
        values.iter_mut().for_each(|value| *value += offset);
        self.backend.vector(&values).map_err(|source| LoadError::Tensor { tensor: name.to_owned(), source })
    }

    fn values(&self, name: &str, len: usize) -> Result<Vec<f32>, LoadError> {
        let view = self.stored(name)?;
        expect(name, view.shape, &[len])?;
        let mut values = vec![0.0; len];
        quant::dequantise(view.dtype, view.bytes, &mut values);
        self.checkpoint.check_of([view.bytes])?;
        Ok(values)
    }

    fn stored(&self, name: &str) -> Result<TensorView<'a>, LoadError> {
        self.checkpoint.tensor(name)?.ok_or_else(|| LoadError::Missing { tensor: name.to_owned() })
    }
}

impl<'a> Matrix<'a> {
    fn whole(&self) -> Slice {
        Slice { rows: 0..self.shape[0], cols: 0..self.shape[1] }
    }

    /// A slice, to be kept as `keep`. Nothing is copied.
    fn source(&self, slice: &Slice, keep: DType) -> Result<MatrixSource<'a>, LoadError> {
        let cols = slice.cols.len();
        let cannot = |keep| LoadError::Format { tensor: self.name.clone(), cols, keep };
        let stored = |elements| self.dtype.row_bytes(elements).ok_or_else(|| cannot(self.dtype));
        keep.row_bytes(cols).ok_or_else(|| cannot(keep))?;
        let row_stride = stored(self.shape[1])?;
        let Range { start, end } = slice.rows;
        let bytes = match slice.rows.is_empty() || cols == 0 {
            true => &[][..],
            false => {
                let first = start * row_stride + stored(slice.cols.start)?;
                let last = (end - 1) * row_stride + stored(slice.cols.end)?;
                &self.bytes[first..last]
            }
        };
        Ok(MatrixSource { dtype: self.dtype, rows: slice.rows.len(), cols, row_stride, bytes, keep })
    }
}

/// The shape `[out, in]` of a matrix, or `[len, 1]` of a vector.
pub(crate) fn shape_of(description: &Description, role: WeightKind, inner: usize) -> [usize; 2] {
    use WeightKind::*;
    let Description { hidden, heads, kv_heads, head_dim, .. } = *description;
    match role {
        AttentionNorm | AttentionPostNorm | FeedForwardNorm | FeedForwardPostNorm => [hidden, 1],
        QueryNorm | KeyNorm => [head_dim, 1],
        Query => [heads * head_dim, hidden],
        Key | Value => [kv_heads * head_dim, hidden],
        QueryBias => [heads * head_dim, 1],
        KeyBias | ValueBias => [kv_heads * head_dim, 1],
        Output => [hidden, heads * head_dim],
        Gate | Up | ExpertGate | ExpertUp => [inner, hidden],
        Down | ExpertDown => [hidden, inner],
        Router => {
            let experts = description.layers.iter().find_map(|layer| match layer.feed_forward {
                FeedForward::Experts { routing, .. } => Some(routing.experts),
                FeedForward::Dense { .. } => None,
            });
            [experts.unwrap_or(0), hidden]
        }
    }
}

fn expect(tensor: &str, found: &[usize], expected: &[usize]) -> Result<(), LoadError> {
    match found == expected {
        true => Ok(()),
        false => {
            Err(LoadError::Shape { tensor: tensor.to_owned(), expected: expected.to_vec(), found: found.to_vec() })
        }
    }
}

/// The block sizes that shards must respect in all layers, so that every layer is split in the same way. Layers that are not
/// in this file belong to another stage and are ignored.
fn row_blocks(checkpoint: &Checkpoint, keep: Option<DType>, rank: Rank) -> Result<RowBlocks, LoadError> {
    let mut blocks = RowBlocks { output: 1, down: 1 };
    if rank.world().get() == 1 {
        return Ok(blocks);
    }
    let description = checkpoint.description();
    for layer in 0..description.layers.len() {
        for (role, block) in [(WeightKind::Output, &mut blocks.output), (WeightKind::Down, &mut blocks.down)] {
            let Some(tensor) = description.architecture.tensor(role) else { continue };
            let Some(stored) = checkpoint.dtype(&checkpoint.layer_name(layer, tensor))? else { continue };
            for dtype in [Some(stored), keep].into_iter().flatten() {
                *block = least_common_multiple(*block, dtype.block_elements());
            }
        }
    }
    Ok(blocks)
}
