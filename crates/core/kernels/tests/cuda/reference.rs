//! The reference for `stack.rs`: the same decoder for one whole sequence, in f64 and without pages.

use half::bf16;

use testing::decoder_stack::{EPS, LayerWeights, Sizes, Table, Weights, frequencies};

/// Logits of every position.
pub fn logits(sizes: &Sizes, weights: &Weights, tokens: &[u32]) -> Vec<Vec<f64>> {
    let embed = |&token: &u32| row(&weights.embedding, token as usize).collect::<Vec<f64>>();
    let mut hidden: Vec<Vec<f64>> = tokens.iter().map(embed).collect();
    for index in 0..sizes.layers {
        layer(sizes, index, &weights.layers[index % weights.layers.len()], &mut hidden);
    }
    hidden.iter().map(|x| linear(&weights.head, &norm(x, &weights.norm))).collect()
}

fn layer(sizes: &Sizes, index: usize, weights: &LayerWeights, hidden: &mut [Vec<f64>]) {
    let (attention, dim) = (sizes.attention(index), sizes.head_dim);
    let mut qkv: Vec<Vec<f64>> = hidden.iter().map(|x| linear(&weights.qkv, &norm(x, &weights.norm[0]))).collect();
    for (position, row) in qkv.iter_mut().enumerate() {
        row.iter_mut().zip(&weights.bias).for_each(|(x, &bias)| *x += f64::from(bias));
        for (heads, weight) in [attention.query, attention.key].into_iter().zip(&weights.head_norm) {
            for head in row[heads.columns()].chunks_mut(dim) {
                let turned = rotate(&norm(head, weight), position);
                head.copy_from_slice(&turned);
            }
        }
    }
    for (position, x) in hidden.iter_mut().enumerate() {
        let oldest = (position + 1).saturating_sub(attention.window.unwrap_or(usize::MAX));
        let mut attended = Vec::new();
        for head in 0..sizes.heads {
            let kv_head = head / (sizes.heads / sizes.kv_heads);
            let query = &qkv[position][head * dim..][..dim];
            let scores: Vec<f64> = (oldest..=position)
                .map(|at| {
                    dot(query, &qkv[at][attention.key.first + kv_head * dim..][..dim]) * f64::from(attention.scale)
                })
                .collect();
            let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let total: f64 = scores.iter().map(|score| (score - top).exp()).sum();
            attended.extend((0..dim).map(|i| {
                let weigh = |(at, score): (usize, &f64)| {
                    (score - top).exp() / total * qkv[oldest + at][attention.value.first + kv_head * dim + i]
                };
                scores.iter().enumerate().map(weigh).sum::<f64>()
            }));
        }
        add(x, &linear(&weights.out, &attended));
        let both = linear(&weights.gate_up, &norm(x, &weights.norm[1]));
        let (gate, up) = both.split_at(sizes.inner);
        let gated: Vec<f64> = gate.iter().zip(up).map(|(gate, up)| gate / (1.0 + (-gate).exp()) * up).collect();
        add(x, &linear(&weights.down, &gated));
    }
}

fn row(table: &Table, index: usize) -> impl Iterator<Item = f64> {
    table.bits[index * table.cols..][..table.cols].iter().map(|x| bf16::to_f64(*x))
}

fn linear(table: &Table, x: &[f64]) -> Vec<f64> {
    (0..table.rows).map(|index| row(table, index).zip(x).map(|(w, x)| w * x).sum()).collect()
}

fn norm(x: &[f64], weight: &[f32]) -> Vec<f64> {
    let factor = (dot(x, x) / x.len() as f64 + f64::from(EPS)).sqrt().recip();
    x.iter().zip(weight).map(|(x, &weight)| f64::from(weight) * x * factor).collect()
}

fn rotate(head: &[f64], position: usize) -> Vec<f64> {
    let half = head.len() / 2;
    let mut turned = head.to_vec();
    for (i, frequency) in frequencies(head.len()).into_iter().enumerate() {
        let (sine, cosine) = f64::from(position as f32 * frequency).sin_cos();
        turned[i] = head[i] * cosine - head[i + half] * sine;
        turned[i + half] = head[i + half] * cosine + head[i] * sine;
    }
    turned
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn add(x: &mut [f64], y: &[f64]) {
    x.iter_mut().zip(y).for_each(|(x, y)| *x += y);
}
