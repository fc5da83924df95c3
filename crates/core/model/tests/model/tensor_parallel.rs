//! A model split over several ranks, each a thread here, gives the same results as on one rank, for every format and for
//! even and uneven splits.

use std::path::Path;
use std::sync::{Barrier, Mutex};
use std::thread;

use model::{Checkpoint, Collective, CollectiveError, LoadError};
use testing::driver::{Driver, Fixture, MODELS, Sequence, distance};
use testing::random_model::{ODD_HEADS, PROMPT, Sizes};
use testing::reference::{Reference, Table};
use types::{DType, Rank, WorldSize};

/// A collective in shared memory that sums in rank order.
struct Group {
    parts: Vec<Mutex<Vec<f32>>>,
    barrier: Barrier,
}

struct ThreadCollective<'a> {
    group: &'a Group,
    rank: Rank,
}

impl Group {
    fn new(world: WorldSize) -> Self {
        let parts = world.ranks().map(|_| Mutex::default()).collect();
        Self { parts, barrier: Barrier::new(world.get()) }
    }
}

impl Collective<Reference> for ThreadCollective<'_> {
    fn all_reduce(&self, _: &Reference, rows: usize, buffer: &mut Table) -> Result<(), CollectiveError> {
        let own = &mut buffer.values[..rows * buffer.cols];
        *self.group.parts[self.rank.index()].lock().unwrap() = own.to_vec();
        self.group.barrier.wait();
        own.fill(0.0);
        for part in &self.group.parts {
            own.iter_mut().zip(part.lock().unwrap().iter()).for_each(|(sum, part)| *sum += part);
        }
        self.group.barrier.wait();
        Ok(())
    }

    fn gather_columns(
        &self,
        _: &Reference,
        rows: usize,
        cols: usize,
        part: &Table,
        whole: Option<&mut Table>,
    ) -> Result<(), CollectiveError> {
        *self.group.parts[self.rank.index()].lock().unwrap() = part.values[..rows * part.cols].to_vec();
        self.group.barrier.wait();
        assert_eq!(whole.is_some(), self.rank.index() == 0);
        if let Some(whole) = whole {
            for rank in self.rank.world().ranks() {
                let (part, shard) = (self.group.parts[rank.index()].lock().unwrap(), rank.shard(cols));
                for row in 0..rows {
                    let columns = &mut whole.values[row * cols..][shard.clone()];
                    columns.copy_from_slice(&part[row * shard.len()..][..shard.len()]);
                }
            }
        }
        self.group.barrier.wait();
        Ok(())
    }
}

/// The hidden states of all ranks must be equal bit for bit, and rank 0's logits close to those of one process.
fn check(path: &Path, keep: Option<DType>, ids: &[u32], world: u16, tolerance: f32) {
    let checkpoint = Checkpoint::open(path).unwrap();
    let layers = checkpoint.description().layers.len() as u32;
    let (alone, _) = Driver::new(&Reference, &checkpoint, keep).prefill(ids, ids.len());
    let world = WorldSize::new(world).unwrap();
    let group = Group::new(world);
    let of_each: Vec<(Vec<f32>, Vec<f32>)> = thread::scope(|scope| {
        let run = |rank| {
            let mut driver = Driver::split(&Reference, &checkpoint, keep, &[layers], rank);
            let collective = ThreadCollective { group: &group, rank };
            let mut states = vec![];
            let mut after = |hidden: Vec<f32>| states.extend(hidden);
            let logits = driver.advance_with(&mut [(&mut Sequence::default(), ids)], &collective, &mut after);
            (states, logits)
        };
        let threads: Vec<_> = world.ranks().map(|rank| scope.spawn(move || run(rank))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let (states, logits) = &of_each[0];
    let apart = distance(logits, &alone);
    assert!(apart <= tolerance, "{} over {} ranks: {apart}", path.display(), world.get());
    for (others, none) in &of_each[1..] {
        assert!(others == states, "{}: the ranks disagree", path.display());
        assert!(none.is_empty());
    }
}

#[test]
fn ranks_together_give_what_one_process_gives() {
    for model in MODELS {
        let fixture = Fixture::open(model);
        let ids = fixture.prompt("mid").ids;
        // 3 divides neither heads nor features nor experts; 4 exceeds the number of KV heads of some models.
        for world in [2, 3, 4] {
            check(&fixture.primary().0, None, &ids, world, fixture.tolerance());
        }
    }
}

#[test]
fn heads_of_odd_sizes_are_shared_whole_and_their_quantised_rows_cut_between_blocks() {
    for size in ODD_HEADS {
        let folder = tempfile::tempdir().unwrap();
        Sizes::of_heads(size).write(folder.path(), DType::F32);
        for (world, keep) in [(2, None), (3, None), (2, Some(DType::Q8_0)), (3, Some(DType::Q8_0))] {
            check(folder.path(), keep, &PROMPT, world, 2e-5);
        }
    }
}

#[test]
fn quantised_rows_are_cut_between_blocks() {
    for (architecture, file) in [("llama", "gguf/tiny-llama-q8_0.gguf"), ("qwen3", "gguf/tiny-qwen3-q8_0.gguf")] {
        let fixture = Fixture::open(architecture);
        let ids = fixture.prompt("mid").ids;
        for world in [2, 3, 4] {
            check(&fixture.path(file), None, &ids, world, fixture.tolerance());
        }
        check(&fixture.variant("f32").unwrap(), Some(DType::Q8_0), &ids, 4, fixture.tolerance());
    }
}

#[test]
fn more_ranks_than_can_have_a_part_are_refused() {
    let fixture = Fixture::open("qwen2");
    let checkpoint = Checkpoint::open(&fixture.variant("f32").unwrap()).unwrap();
    let rank = WorldSize::new(5).unwrap().rank(0).unwrap();
    let step = kernels::StepLimits { rows: 1, sequences: 1, pages: 1 };
    let limits = model::Limits { step, logit_rows: 1, kv_pages: 1, positions: 32 };
    let options = model::LoadOptions { keep: None, limits };
    let range = types::LayerRange::new(0, 1).unwrap();
    let refused = model::Block::load(&Reference, &checkpoint, range, rank, &options, &mut |_| {}).err();
    let Some(LoadError::Split(refused)) = refused else { panic!("{refused:?}") };
    assert!(refused.to_string().contains("5 ranks"), "{refused}");
}
