//! Ops that work row by row: norms, RoPE, gates, sums.

use std::sync::{PoisonError, RwLock, RwLockReadGuard};

use super::lanes::for_each_level;
use super::level::Level;
use super::memory::Aligned;
use super::pool::Pool;
use crate::{Activation, BackendError, Heads, RopeLayout};

/// Up to this many elements the calling thread runs an op alone, because dispatching it to the pool would cost more.
const SERIAL_ELEMENTS_MAX: usize = 16 * 1024;

/// Calls `work` for every row, in parallel if there is enough work.
pub(super) fn for_rows(pool: &Pool, rows: usize, cols: usize, work: &(dyn Fn(usize) + Sync)) {
    for_row_chunks(pool, rows, cols, 4, work);
}

/// The same, with runs of `at_once` rows per chunk, so that workers do not write to the same cache lines.
pub(super) fn for_row_chunks(pool: &Pool, rows: usize, cols: usize, at_once: usize, work: &(dyn Fn(usize) + Sync)) {
    if rows * cols <= SERIAL_ELEMENTS_MAX {
        (0..rows).for_each(work);
    } else {
        pool.run(rows.div_ceil(at_once), &|_, run| {
            (run * at_once..rows.min((run + 1) * at_once)).for_each(work);
        });
    }
}

for_each_level! {
    #[inline]
    unsafe fn norm_scale(x: *const f32, len: usize, eps: f32) -> f32 {
        let whole = len / 16 * 16;
        let mut squares = splat(0.0);
        for i in (0..whole).step_by(16) {
            let x = load(x.add(i));
            squares = fma(x, x, squares);
        }
        let mut total = sum(squares);
        for i in whole..len {
            total = (*x.add(i)).mul_add(*x.add(i), total);
        }
        1.0 / (total / len as f32 + eps).sqrt()
    }

    unsafe fn norm_row(out: *mut f32, x: *const f32, weight: &[f32], eps: f32) {
        let len = weight.len();
        let whole = len / 16 * 16;
        let scale = norm_scale(x, len, eps);
        for i in (0..whole).step_by(16) {
            store(out.add(i), mul(mul(load(x.add(i)), splat(scale)), load(weight.as_ptr().add(i))));
        }
        for i in whole..len {
            *out.add(i) = *x.add(i) * scale * weight[i];
        }
    }

    #[inline]
    unsafe fn gate_vector(x: V, up: V, activation: Activation) -> V {
        let activated = match activation {
            Activation::Silu => div(x, add(splat(1.0), exp(sub(splat(0.0), x)))),
            Activation::GeluTanh => {
                // x / (1 + exp(-2 z)) with z = sqrt(2 / pi) (x + 0.044715 x^3): the same as x (1 + tanh z) / 2.
                let cube = mul(mul(x, x), x);
                let z = mul(splat(0.797_884_6), fma(splat(0.044_715), cube, x));
                div(x, add(splat(1.0), exp(mul(splat(-2.0), z))))
            }
        };
        mul(activated, up)
    }

    unsafe fn gate_row(out: &mut [f32], gate: &[f32], up: &[f32], activation: Activation) {
        let (len, whole) = (out.len(), out.len() / 16 * 16);
        for i in (0..whole).step_by(16) {
            let value = gate_vector(load(gate.as_ptr().add(i)), load(up.as_ptr().add(i)), activation);
            store(out.as_mut_ptr().add(i), value);
        }
        if whole < len {
            // The tail is copied to a full vector.
            let (mut g, mut u) = ([0f32; 16], [0f32; 16]);
            g[..len - whole].copy_from_slice(&gate[whole..len]);
            u[..len - whole].copy_from_slice(&up[whole..len]);
            store(g.as_mut_ptr(), gate_vector(load(g.as_ptr()), load(u.as_ptr()), activation));
            out[whole..].copy_from_slice(&g[..len - whole]);
        }
    }

    unsafe fn add_row(x: &mut [f32], y: &[f32]) {
        for (x, y) in x.iter_mut().zip(y) {
            *x += y;
        }
    }

    unsafe fn add_scaled_row(x: &mut [f32], y: &[f32], weight: f32) {
        for (x, y) in x.iter_mut().zip(y) {
            *x = weight.mul_add(*y, *x);
        }
    }

    unsafe fn rotate_row(x: &mut [f32], heads: Heads, turn: &[f32], layout: RopeLayout) {
        let half = turn.len() / 2;
        let (cos, sin) = turn.split_at(half);
        for head in x[heads.columns()].chunks_exact_mut(heads.dim) {
            match layout {
                RopeLayout::Halves => {
                    let (low, high) = head.split_at_mut(half);
                    for ((low, high), (cos, sin)) in low.iter_mut().zip(high).zip(cos.iter().zip(sin)) {
                        (*low, *high) = (*low * cos - *high * sin, *high * cos + *low * sin);
                    }
                }
                RopeLayout::Pairs => {
                    for (pair, (cos, sin)) in head.chunks_exact_mut(2).zip(cos.iter().zip(sin)) {
                        (pair[0], pair[1]) = (pair[0] * cos - pair[1] * sin, pair[1] * cos + pair[0] * sin);
                    }
                }
            }
        }
    }
}

/// Calls a row function compiled for `level`.
macro_rules! at_level {
    ($level:expr, $name:ident($($arg:expr),*)) => {
        // SAFETY: the CPU has the level (`CpuBackend::new` checks it), and the arguments are slices, or pointers into
        // slices as long as the op's contract says.
        unsafe {
            match $level {
                #[cfg(target_arch = "x86_64")]
                Level::Avx512 | Level::Amx => avx512::$name($($arg),*),
                #[cfg(target_arch = "x86_64")]
                Level::Avx2 => avx2::$name($($arg),*),
                _ => scalar::$name($($arg),*),
            }
        }
    };
}

/// `out = weight * x / sqrt(mean(x * x) + eps)`.
pub(super) fn rms_norm(level: Level, out: &mut [f32], x: &[f32], weight: &[f32], eps: f32) {
    assert!(out.len() == weight.len() && x.len() == weight.len());
    at_level!(level, norm_row(out.as_mut_ptr(), x.as_ptr(), weight, eps));
}

/// The factor `1 / sqrt(mean(x * x) + eps)` of an RMS norm.
pub(super) fn norm_scale(level: Level, x: &[f32], eps: f32) -> f32 {
    at_level!(level, norm_scale(x.as_ptr(), x.len(), eps))
}

/// RMS norm within each head, in place.
pub(super) fn rms_norm_heads(level: Level, row: &mut [f32], heads: Heads, weight: &[f32], eps: f32) {
    for head in row[heads.columns()].chunks_exact_mut(heads.dim) {
        assert!(head.len() == weight.len());
        at_level!(level, norm_row(head.as_mut_ptr(), head.as_ptr(), weight, eps));
    }
}

/// `out = activation(gate) * up`.
pub(super) fn gate(level: Level, out: &mut [f32], gate: &[f32], up: &[f32], activation: Activation) {
    assert!(gate.len() == out.len() && up.len() == out.len());
    at_level!(level, gate_row(out, gate, up, activation));
}

/// `x += y`.
pub(super) fn add_to(level: Level, x: &mut [f32], y: &[f32]) {
    at_level!(level, add_row(x, y));
}

/// `x += weight * y`.
pub(super) fn add_scaled_to(level: Level, x: &mut [f32], y: &[f32], weight: f32) {
    at_level!(level, add_scaled_row(x, y, weight));
}

/// RoPE sines and cosines of every position, computed when a position is first needed.
pub struct Rope {
    inv_freq: Vec<f32>,
    scale: f32,
    layout: RopeLayout,
    table: RwLock<Table>,
}

struct Table {
    /// `[position][cosines, then sines]`
    values: Aligned<f32>,
    /// Positions computed so far.
    filled: usize,
}

impl Rope {
    pub(super) fn new(
        inv_freq: &[f32],
        scale: f32,
        positions: usize,
        layout: RopeLayout,
    ) -> Result<Self, BackendError> {
        let what = "rotation angles";
        let len =
            positions.checked_mul(inv_freq.len() * 2).ok_or(BackendError::OutOfMemory { what, bytes: usize::MAX })?;
        let table = RwLock::new(Table { values: Aligned::zeroed(what, len)?, filled: 0 });
        Ok(Self { inv_freq: inv_freq.to_vec(), scale, layout, table })
    }

    /// Computes the table for all positions below `end`, if it is not there yet.
    fn reach(&self, end: usize) {
        /// Positions computed in advance, so that a decode loop seldom takes the write lock.
        const AHEAD: usize = 64;
        if self.table.read().unwrap_or_else(PoisonError::into_inner).filled >= end {
            return;
        }
        let mut table = self.table.write().unwrap_or_else(PoisonError::into_inner);
        let half = self.inv_freq.len();
        let positions = table.values.len() / (2 * half).max(1);
        assert!(end <= positions, "{end} positions needed, RoPE table has {positions}");
        let from = table.filled;
        let to = (end + AHEAD).min(positions);
        for position in from..to {
            let (cos, sin) = table.values[position * 2 * half..(position + 1) * 2 * half].split_at_mut(half);
            for ((cos, sin), freq) in cos.iter_mut().zip(sin).zip(&self.inv_freq) {
                // The angle is rounded to f32 first, as in other implementations: models were trained with that.
                let (s, c) = f64::from(position as f32 * freq).sin_cos();
                (*cos, *sin) = (c as f32 * self.scale, s as f32 * self.scale);
            }
        }
        table.filled = table.filled.max(to);
    }

    /// The angles of all positions below `end`.
    pub(super) fn angles(&self, end: usize) -> Angles<'_> {
        self.reach(end);
        let table = self.table.read().unwrap_or_else(PoisonError::into_inner);
        Angles { table, width: self.inv_freq.len() * 2, layout: self.layout }
    }
}

/// Read access to the computed sines and cosines.
pub(super) struct Angles<'a> {
    table: RwLockReadGuard<'a, Table>,
    width: usize,
    layout: RopeLayout,
}

impl Angles<'_> {
    /// Applies RoPE to the heads of one row.
    pub(super) fn rotate(&self, level: Level, row: &mut [f32], heads: Heads, position: usize) {
        let width = self.width;
        assert!(width <= heads.dim, "a rotation is at most as wide as a head");
        let turn = &self.table.values[position * width..(position + 1) * width];
        at_level!(level, rotate_row(row, heads, turn, self.layout));
    }
}
