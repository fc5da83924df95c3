//! The weights of all ranks together are the model's weights. Only routers, and KV heads if there are more ranks than KV
//! heads, are replicated.

use model::{Checkpoint, Description, FeedForward};
use testing::driver::{Driver, Fixture, MODELS};
use testing::reference::Reference;
use types::{Rank, WorldSize};

/// The number of weights of a rank. The reference stores each in four bytes.
fn elements(checkpoint: &Checkpoint, rank: Rank) -> usize {
    let layers = checkpoint.description().layers.len() as u32;
    let driver = Driver::split(&Reference, checkpoint, None, &[layers], rank);
    (driver.embedding.weight_bytes() + driver.lm_head.weight_bytes() + driver.blocks[0].weight_bytes())
        / size_of::<f32>()
}

/// The number of replicated elements over all ranks: routers, and KV projections if there are more ranks than KV heads.
fn replicated(description: &Description, world: usize) -> usize {
    let routers = description.layers.iter().map(|layer| match layer.feed_forward {
        FeedForward::Experts { routing, .. } => routing.experts * description.hidden,
        FeedForward::Dense { .. } => 0,
    });
    let head = 2 * description.head_dim * description.hidden * description.layers.len();
    (world - 1) * routers.sum::<usize>() + world.saturating_sub(description.kv_heads) * head
}

#[test]
fn ranks_together_hold_every_weight_once() {
    let mut paths = Vec::new();
    for model in MODELS {
        paths.push(Fixture::open(model).primary().0);
    }
    paths.push(Fixture::open("llama").path("gguf/tiny-llama-q8_0.gguf"));
    for path in paths {
        let checkpoint = Checkpoint::open(&path).unwrap();
        let whole = elements(&checkpoint, Rank::SINGLE);
        for world in [2, 3, 4] {
            let ranks = WorldSize::new(world).unwrap().ranks().map(|rank| elements(&checkpoint, rank));
            let expected = whole + replicated(checkpoint.description(), usize::from(world));
            assert_eq!(ranks.sum::<usize>(), expected, "{} on {world} ranks", path.display());
        }
    }
}
