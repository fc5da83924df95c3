//! `Block`: a loaded range of decoder layers for one rank, with its KV pages and working buffers. Every process, rank, stage
//! or peer runs a `Block`. A forward pass allocates nothing.

use std::ops::Range;

use kernels::{Activation, Attention, Backend, Gated, Heads, KvShape, NormRope, Routing, Rows};
use types::{LayerRange, Rank, WorldSize};

use crate::architecture::WeightKind;
use crate::checkpoint::Checkpoint;
use crate::collective::{Collective, CollectiveError};
use crate::description::{Description, FeedForward, Layer as LayerDescription};
use crate::load::{LoadError, LoadOptions, Loader};
use crate::rope::Rope;

pub struct Block<B: Backend> {
    range: LayerRange,
    world: WorldSize,
    layers: Vec<Layer<B>>,
    /// The distinct RoPE tables of the layers.
    ropes: Vec<B::Rope>,
    work: Workspace<B>,
    eps: f32,
    activation: Activation,
    weight_bytes: usize,
}

struct Layer<B: Backend> {
    attention_norm: B::Vector,
    /// Query, key and value projections, stacked.
    qkv: B::Matrix,
    qkv_bias: Option<B::Vector>,
    query_norm: Option<B::Vector>,
    key_norm: Option<B::Vector>,
    rope: usize,
    attention: Attention,
    kv: B::Kv,
    output: B::Matrix,
    attention_post_norm: Option<B::Vector>,
    feed_forward_norm: B::Vector,
    feed_forward: FeedForwardWeights<B>,
    feed_forward_post_norm: Option<B::Vector>,
}

enum FeedForwardWeights<B: Backend> {
    Dense(Gated<B::Matrix>),
    Experts { router: B::Matrix, experts: Vec<Gated<B::Matrix>>, first: usize, routing: Routing },
}

/// Buffers that all layers reuse, allocated for the largest step.
struct Workspace<B: Backend> {
    normed: B::Buffer,    // [rows, hidden]
    qkv: B::Buffer,       // [rows, (heads + 2 kv_heads) head_dim]
    attended: B::Buffer,  // [rows, heads head_dim]
    projected: B::Buffer, // [rows, hidden]
    dense: Option<DenseWorkspace<B>>,
    experts: Option<ExpertsWorkspace<B>>,
}

struct DenseWorkspace<B: Backend> {
    gate_up: B::Buffer, // [rows, 2 inner]
    gated: B::Buffer,   // [rows, inner]
}

struct ExpertsWorkspace<B: Backend> {
    logits: B::Buffer, // [rows, experts]
    scratch: B::Scratch,
}

impl<B: Backend> Block<B> {
    /// Loads the layers one after another. Calls `progress` with the number of layers loaded so far.
    pub fn load(
        backend: &B,
        from: &Checkpoint,
        layers: LayerRange,
        rank: Rank,
        options: &LoadOptions,
        progress: &mut dyn FnMut(usize),
    ) -> Result<Self, LoadError> {
        let description = from.description();
        let count = description.layers.len();
        let described = description.layers.get(layers.start()..layers.end());
        let described = described.ok_or(LoadError::Layers { layers, count })?;
        let mut loader = Loader::new(backend, from, options, rank)?;

        let mut distinct: Vec<&Rope> = Vec::new();
        let mut loaded = Vec::with_capacity(described.len());
        for (index, layer) in layers.iter().zip(described) {
            let rope = distinct.iter().position(|rope| **rope == layer.rope).unwrap_or_else(|| {
                distinct.push(&layer.rope);
                distinct.len() - 1
            });
            loaded.push(Layer::load(backend, &mut loader, description, index, rope, options.limits.kv_pages)?);
            progress(loaded.len());
        }
        let ropes = distinct.iter().map(|rope| {
            let inv_freq = rope.inv_freq(description.head_dim);
            backend.rope(&inv_freq, 1.0, options.limits.positions, description.rope_layout)
        });
        Ok(Self {
            range: layers,
            world: rank.world(),
            layers: loaded,
            ropes: ropes.collect::<Result<_, _>>()?,
            work: Workspace::new(backend, &loader, description, described, options.limits.step.rows)?,
            eps: description.eps,
            activation: description.activation,
            weight_bytes: loader.weight_bytes,
        })
    }

    /// Runs these of its layers on the residual stream of the step's rows, in place.
    ///
    /// # Panics
    ///
    /// If it does not have them all.
    pub fn forward(
        &mut self,
        backend: &B,
        step: &B::Step,
        rows: Rows,
        layers: LayerRange,
        hidden: &mut B::Buffer,
        collective: &dyn Collective<B>,
    ) -> Result<(), CollectiveError> {
        let (eps, work) = (self.eps, &mut self.work);
        // Ranks exchange rows of `normed` as plain f32, so `normed` gets the consumer's layout only with a single rank.
        let is_solo = self.world == WorldSize::ONE;
        assert!(self.range.contains(layers), "layers {layers} of a block with {}", self.range);
        let first = self.range.start();
        let mut layers = &mut self.layers[layers.start() - first..layers.end() - first];
        if let Some(first) = layers.first() {
            let (normed, consumer) = (&mut work.normed, Some(&first.qkv).filter(|_| is_solo));
            backend.add_rms_norm(rows, 0..rows.all(), normed, hidden, None, &first.attention_norm, eps, consumer);
        }
        // Between layers a rank need not have all rows of the residual stream, only those of which it computes rows of
        // `normed`.
        while let Some((layer, after)) = layers.split_first_mut() {
            layer.attend(backend, step, rows, work, &self.ropes, eps);
            let post_norm = layer.attention_post_norm.as_ref();
            let Workspace { projected, normed, .. } = &mut *work;
            let consumer = layer.feed_forward.consumer().filter(|_| is_solo);
            let norm = &layer.feed_forward_norm;
            collective.reduce_into(backend, rows.all(), projected, normed, &mut |projected, normed, made| {
                let y = add_post_normed(backend, made.clone(), hidden, projected, post_norm, normed, eps);
                backend.add_rms_norm(rows, made, normed, hidden, y, norm, eps, consumer);
            })?;

            layer.feed_forward.run(backend, rows, work, self.activation);
            let post_norm = layer.feed_forward_post_norm.as_ref();
            let Workspace { projected, normed, .. } = &mut *work;
            match after.first() {
                Some(next) => {
                    let (norm, consumer) = (&next.attention_norm, Some(&next.qkv).filter(|_| is_solo));
                    let mut each = |projected: &B::Buffer, normed: &mut B::Buffer, made: Range<usize>| {
                        let y = add_post_normed(backend, made.clone(), hidden, projected, post_norm, normed, eps);
                        backend.add_rms_norm(rows, made, normed, hidden, y, norm, eps, consumer);
                    };
                    collective.reduce_into(backend, rows.all(), projected, normed, &mut each)?;
                }
                None => {
                    let mut each = |projected: &B::Buffer, hidden: &mut B::Buffer, made: Range<usize>| {
                        if let Some(y) =
                            add_post_normed(backend, made.clone(), hidden, projected, post_norm, normed, eps)
                        {
                            backend.add(made, hidden, y);
                        }
                    };
                    collective.reduce_into(backend, rows.all(), projected, hidden, &mut each)?;
                }
            }
            layers = after;
        }
        Ok(())
    }

    pub fn layers(&self) -> LayerRange {
        self.range
    }

    /// Bytes of the packed matrices.
    pub fn weight_bytes(&self) -> usize {
        self.weight_bytes
    }
}

impl<B: Backend> Layer<B> {
    fn load(
        backend: &B,
        loader: &mut Loader<'_, B>,
        description: &Description,
        index: usize,
        rope: usize,
        pages: usize,
    ) -> Result<Self, LoadError> {
        let described = &description.layers[index];
        let attention = attention(description, described, loader);
        let shape = KvShape { kv_heads: attention.key.count, head_dim: description.head_dim };
        let always = "every architecture has this norm";
        Ok(Self {
            attention_norm: loader.norm(index, WeightKind::AttentionNorm)?.expect(always),
            qkv: loader.pack(loader.linear(index, &[WeightKind::Query, WeightKind::Key, WeightKind::Value], 0)?)?,
            qkv_bias: loader.bias(index, &[WeightKind::QueryBias, WeightKind::KeyBias, WeightKind::ValueBias])?,
            query_norm: loader.norm(index, WeightKind::QueryNorm)?,
            key_norm: loader.norm(index, WeightKind::KeyNorm)?,
            rope,
            attention,
            kv: backend.kv(shape, pages)?,
            output: loader.pack(loader.linear(index, &[WeightKind::Output], 0)?)?,
            attention_post_norm: loader.norm(index, WeightKind::AttentionPostNorm)?,
            feed_forward_norm: loader.norm(index, WeightKind::FeedForwardNorm)?.expect(always),
            feed_forward: FeedForwardWeights::load(loader, index, described.feed_forward)?,
            feed_forward_post_norm: loader.norm(index, WeightKind::FeedForwardPostNorm)?,
        })
    }

    /// `projected = output(attend(query, key, value))` of `normed`.
    fn attend(
        &mut self,
        backend: &B,
        step: &B::Step,
        rows: Rows,
        work: &mut Workspace<B>,
        ropes: &[B::Rope],
        eps: f32,
    ) {
        let turn = NormRope {
            query_norm: self.query_norm.as_ref(),
            key_norm: self.key_norm.as_ref(),
            eps,
            rope: &ropes[self.rope],
        };
        let Workspace { normed, qkv, attended, projected, .. } = work;
        backend.linear(rows, qkv, normed, &self.qkv, self.qkv_bias.as_ref());
        backend.norm_rope_attend(step, rows, attended, qkv, &mut self.kv, &self.attention, &turn, &self.output);
        backend.linear(rows, projected, attended, &self.output, None);
    }
}

impl<B: Backend> FeedForwardWeights<B> {
    fn load(loader: &mut Loader<'_, B>, index: usize, described: FeedForward) -> Result<Self, LoadError> {
        Ok(match described {
            FeedForward::Dense { inner } => Self::Dense(Gated {
                gate_up: loader.pack(loader.linear(index, &[WeightKind::Gate, WeightKind::Up], inner)?)?,
                down: loader.pack(loader.linear(index, &[WeightKind::Down], inner)?)?,
            }),
            FeedForward::Experts { inner, routing } => Self::Experts {
                router: loader.pack(loader.router(index)?)?,
                first: loader.shards.experts.start,
                experts: loader
                    .shards
                    .experts
                    .clone()
                    .map(|expert| {
                        let Gated { gate_up, down } = loader.expert(index, inner, expert)?;
                        Ok(Gated { gate_up: loader.pack(gate_up)?, down: loader.pack(down)? })
                    })
                    .collect::<Result<_, LoadError>>()?,
                routing,
            },
        })
    }

    /// The only matrix that reads `normed`; `None` if there are several.
    fn consumer(&self) -> Option<&B::Matrix> {
        match self {
            Self::Dense(weights) => Some(&weights.gate_up),
            Self::Experts { .. } => None,
        }
    }

    /// `projected = down(activation(gate n) * (up n))` of `normed`, or the chosen experts' weighted sum of that.
    fn run(&self, backend: &B, rows: Rows, work: &mut Workspace<B>, activation: Activation) {
        let Workspace { normed, projected, dense, experts: routed, .. } = work;
        match self {
            Self::Dense(weights) => {
                let DenseWorkspace { gate_up, gated } =
                    dense.as_mut().expect("allocated for blocks with a dense layer");
                backend.feed_forward(rows, projected, normed, weights, activation, gate_up, gated);
            }
            Self::Experts { router, experts, first, routing } => {
                let ExpertsWorkspace { logits, scratch } =
                    routed.as_mut().expect("allocated for blocks with a layer of experts");
                backend.linear(rows, logits, normed, router, None);
                backend.experts(rows, projected, normed, logits, *routing, *first, experts, activation, scratch);
            }
        }
    }
}

impl<B: Backend> Workspace<B> {
    fn new(
        backend: &B,
        loader: &Loader<'_, B>,
        description: &Description,
        layers: &[LayerDescription],
        rows: usize,
    ) -> Result<Self, LoadError> {
        let (hidden, dim, shards) = (description.hidden, description.head_dim, &loader.shards);
        let (heads, kv_heads, own) = (shards.heads.len(), shards.kv_heads.len(), shards.inner.len());
        let (mut dense, mut experts) = (None, None);
        for layer in layers {
            match layer.feed_forward {
                FeedForward::Dense { .. } if dense.is_none() => {
                    dense = Some(DenseWorkspace {
                        gate_up: backend.output(rows, 2 * own)?,
                        gated: backend.buffer(rows, own)?,
                    });
                }
                FeedForward::Experts { inner, routing } if experts.is_none() => {
                    let scratch = backend.scratch(rows, hidden, inner, routing)?;
                    experts = Some(ExpertsWorkspace { logits: backend.output(rows, routing.experts)?, scratch });
                }
                _ => {}
            }
        }
        Ok(Self {
            normed: backend.buffer(rows, hidden)?,
            qkv: backend.output(rows, (heads + 2 * kv_heads) * dim)?,
            attended: backend.buffer(rows, heads * dim)?,
            projected: backend.output(rows, hidden)?,
            dense,
            experts,
        })
    }
}

/// With a post-norm, adds the norm of `projected` to `hidden`, using `normed` as scratch, and returns `None`. Without one,
/// returns `projected`, which the caller still has to add.
fn add_post_normed<'a, B: Backend>(
    backend: &B,
    rows: Range<usize>,
    hidden: &mut B::Buffer,
    projected: &'a B::Buffer,
    post_norm: Option<&B::Vector>,
    normed: &mut B::Buffer,
    eps: f32,
) -> Option<&'a B::Buffer> {
    let Some(norm) = post_norm else { return Some(projected) };
    backend.rms_norm(rows.clone(), normed, projected, norm, eps);
    backend.add(rows, hidden, normed);
    None
}

/// The columns of this rank's heads in a row of the stacked projection, and the layer's attention parameters.
fn attention<B: Backend>(description: &Description, layer: &LayerDescription, loader: &Loader<'_, B>) -> Attention {
    let dim = description.head_dim;
    let (heads, kv_heads) = (loader.shards.heads.len(), loader.shards.kv_heads.len());
    let query = Heads { first: 0, count: heads, dim };
    let key = Heads { first: query.columns().end, count: kv_heads, dim };
    let value = Heads { first: key.columns().end, count: kv_heads, dim };
    Attention { query, key, value, scale: description.attention_scale, window: layer.window }
}
