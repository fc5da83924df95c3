//! Mixture of experts: route every row to its top experts, run each expert on the rows routed to it, sum the results.
//!
//! A row's result is summed in the order of expert numbers, independently of the other rows.

use super::{Buffer, CpuBackend, Matrix, rows};
use crate::{Activation, Backend, BackendError, Gated, Routing, Rows};

/// Scratch memory for up to `rows` rows (the argument of `new`).
pub struct Scratch {
    /// `[rows][chosen]`: expert and weight, experts ascending.
    choices: Vec<(u32, f32)>,
    /// Router probabilities of one row.
    probabilities: Vec<f32>,
    /// Rows routed to one expert, and their weights.
    members: Vec<(u32, f32)>,
    gathered: Buffer,
    inner: Buffer,
    gated: Buffer,
    result: Buffer,
}

impl Scratch {
    /// `parts`: the most int8 parts of a row.
    pub(super) fn new(
        rows: usize,
        hidden: usize,
        inner: usize,
        routing: Routing,
        parts: usize,
    ) -> Result<Self, BackendError> {
        Ok(Self {
            choices: Vec::with_capacity(rows * routing.chosen),
            probabilities: Vec::with_capacity(routing.experts),
            members: Vec::with_capacity(rows),
            gathered: Buffer::new(rows, hidden, parts)?,
            inner: Buffer::output(rows, 2 * inner)?,
            gated: Buffer::new(rows, inner, parts)?,
            result: Buffer::output(rows, hidden)?,
        })
    }

    /// Bytes that `new` would allocate.
    pub(super) fn bytes(rows: usize, hidden: usize, inner: usize, routing: Routing, parts: usize) -> usize {
        let lists = (rows * routing.chosen + rows) * size_of::<(u32, f32)>() + routing.experts * size_of::<f32>();
        let inputs = Buffer::bytes(rows, hidden, parts) + Buffer::bytes(rows, inner, parts);
        lists + inputs + Buffer::output_bytes(rows, 2 * inner) + Buffer::output_bytes(rows, hidden)
    }
}

#[allow(clippy::too_many_arguments)] // the arguments of `Backend::experts`
pub(super) fn run(
    backend: &CpuBackend,
    rows: Rows,
    out: &mut Buffer,
    x: &Buffer,
    logits: &Buffer,
    routing: Routing,
    first: usize,
    experts: &[Gated<Matrix>],
    activation: Activation,
    scratch: &mut Scratch,
) {
    assert_eq!(logits.cols, routing.experts);
    let (cols, all) = (x.cols, rows.all());
    scratch.choices.clear();
    for row in logits.rows(all).chunks_exact(routing.experts) {
        route(row, routing, &mut scratch.probabilities, &mut scratch.choices);
    }
    out.rows_mut(all).fill(0.0);
    for (index, expert) in experts.iter().enumerate() {
        let expert_id = (first + index) as u32;
        scratch.members.clear();
        for (row, choices) in scratch.choices.chunks_exact(routing.chosen).enumerate() {
            if let Some((_, weight)) = choices.iter().find(|(expert, _)| *expert == expert_id) {
                scratch.members.push((row as u32, *weight));
            }
        }
        let count = scratch.members.len();
        if count == 0 {
            continue;
        }
        let generated = scratch.members.partition_point(|(row, _)| (*row as usize) < rows.decode);
        let members = Rows { decode: generated, prefill: count - generated };
        let gathered = scratch.gathered.rows_mut(count);
        for (to, (row, _)) in gathered.chunks_exact_mut(cols).zip(&scratch.members) {
            to.copy_from_slice(&x.data[*row as usize * cols..][..cols]);
        }
        let Scratch { gathered, inner, gated, result, .. } = scratch;
        backend.feed_forward(members, result, gathered, expert, activation, inner, gated);
        let out = out.rows_mut(all);
        for (from, (row, weight)) in scratch.result.rows(count).chunks_exact(cols).zip(&scratch.members) {
            rows::add_scaled_to(backend.level, &mut out[*row as usize * cols..][..cols], from, *weight);
        }
    }
}

/// Appends the top experts of one row, in ascending order, with their weights.
fn route(logits: &[f32], routing: Routing, probabilities: &mut Vec<f32>, choices: &mut Vec<(u32, f32)>) {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    probabilities.clear();
    probabilities.extend(logits.iter().map(|logit| (logit - max).exp()));
    let total: f32 = probabilities.iter().sum();
    probabilities.iter_mut().for_each(|p| *p /= total);
    let start = choices.len();
    for _ in 0..routing.chosen {
        let taken = |expert: usize, choices: &[(u32, f32)]| choices.iter().any(|(e, _)| *e as usize == expert);
        let mut best = None::<(usize, f32)>;
        for (expert, &p) in probabilities.iter().enumerate() {
            // On ties, and with NaN, the lower expert number wins.
            if !taken(expert, &choices[start..]) && best.is_none_or(|(_, top)| p > top) {
                best = Some((expert, p));
            }
        }
        let (expert, p) = best.expect("there are at least as many experts as are chosen");
        choices.push((expert as u32, p));
    }
    let chosen = &mut choices[start..];
    if routing.normalise {
        let total: f32 = chosen.iter().map(|(_, p)| p).sum();
        chosen.iter_mut().for_each(|(_, p)| *p /= total);
    }
    chosen.sort_unstable_by_key(|(expert, _)| *expert);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_goes_to_its_best_experts_with_weights_that_sum_to_one() {
        let routing = Routing { experts: 4, chosen: 2, normalise: true };
        let (mut probabilities, mut choices) = (Vec::new(), Vec::new());
        route(&[0.0, 3.0, -1.0, 2.0], routing, &mut probabilities, &mut choices);
        assert_eq!(choices.iter().map(|(e, _)| *e).collect::<Vec<_>>(), [1, 3]);
        let want = 1.0 / (1.0 + (-1f32).exp());
        assert!((choices[0].1 - want).abs() < 1e-6 && (choices[1].1 - (1.0 - want)).abs() < 1e-6);
    }
}
