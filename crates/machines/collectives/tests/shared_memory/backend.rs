//! `ShmComm` as the collective of a backend. The segment holds three rows.

use std::sync::{Barrier, Mutex};

use collectives::{CommError, Communicator as _, GroupCollective};
use kernels::Backend;
use kernels::cpu::{Buffer, CpuBackend, CpuOptions};
use model::{Collective, CollectiveError};
use types::Rank;

use testing::shared_memory_group::{Group, bits, numbers, sum};
use testing::watchdog::watched;

const ROWS: usize = 4;
const COLS: usize = 11;
const MANY: usize = 10;

/// Runs `part` as every rank, each with its own collective and backend.
fn all(size: u16, part: impl Fn(&dyn Collective<CpuBackend>, &CpuBackend, Rank) + Sync) {
    within(Group::new(size, 3 * COLS), part);
}

fn within(group: Group, part: impl Fn(&dyn Collective<CpuBackend>, &CpuBackend, Rank) + Sync) {
    let comms = Mutex::new(group.limits.world.ranks().map(|rank| group.comm(rank.index() as u16)).collect::<Vec<_>>());
    std::thread::scope(|scope| {
        for _ in group.limits.world.ranks() {
            scope.spawn(|| {
                let comm = comms.lock().unwrap().pop().unwrap();
                let (rank, collective) = (comm.rank(), GroupCollective::over(comm));
                let backend = CpuBackend::new(CpuOptions { threads: 1, ..CpuOptions::default() }).unwrap();
                part(&collective, &backend, rank);
            });
        }
    });
}

#[test]
fn the_rows_of_a_buffer_are_summed_and_those_after_them_stay() {
    watched(|| {
        all(3, |collective, backend, rank| {
            let before = numbers(rank, 0, ROWS * COLS);
            let mut buffer = backend.buffer(ROWS, COLS).unwrap();
            backend.write(&mut buffer, &before).unwrap();
            collective.all_reduce(backend, 3, &mut buffer).unwrap();
            let mut after = vec![0.0; ROWS * COLS];
            backend.read(&buffer, 0..ROWS, &mut after).unwrap();
            assert_eq!(bits(&after[..3 * COLS]), bits(&sum(rank.world().ranks(), 0, 3 * COLS)));
            assert_eq!(bits(&after[3 * COLS..]), bits(&before[3 * COLS..]));
        });
    });
}

/// Gathers buffers with each rank's shard of the columns on rank 0.
fn gather(collective: &dyn Collective<CpuBackend>, backend: &CpuBackend, rank: Rank, rows: usize) {
    let width = rank.shard(COLS).len();
    let mut part = backend.output(rows, width).unwrap();
    backend.write(&mut part, &numbers(rank, 0, rows * width)).unwrap();
    let mut whole = (rank.index() == 0).then(|| backend.output(rows, COLS).unwrap());
    collective.gather_columns(backend, rows, COLS, &part, whole.as_mut()).unwrap();
    let Some(whole) = whole else { return };
    let mut values = vec![0.0; rows * COLS];
    backend.read(&whole, 0..rows, &mut values).unwrap();
    for owner in rank.world().ranks() {
        let (share, part) = (owner.shard(COLS), numbers(owner, 0, rows * owner.shard(COLS).len()));
        for row in 0..rows {
            let found = &values[row * COLS..][share.clone()];
            assert_eq!(bits(found), bits(&part[row * share.len()..][..share.len()]), "row {row} of {owner}");
        }
    }
}

#[test]
fn the_shards_of_columns_are_gathered_by_the_first_rank() {
    watched(|| all(3, |collective, backend, rank| gather(collective, backend, rank, 2)));
}

#[test]
fn rows_that_are_made_from_sums_are_shared_when_there_are_many_and_are_the_same_everywhere() {
    const COLS: usize = 1024;
    watched(|| {
        // Of the chunks of 64 rows the last is short: in some cases too short to be scattered.
        for (size, rows, is_shared) in [(1, 130, false), (2, 130, true), (3, 100, true), (2, 5, false)] {
            let (size, rows): (u16, usize) = (size, rows);
            within(Group::new(size, 64 * COLS), |collective, backend, rank| {
                let mut from = backend.output(rows + 1, COLS).unwrap();
                let mut to = backend.buffer(rows + 1, COLS).unwrap();
                backend.write(&mut from, &numbers(rank, 0, (rows + 1) * COLS)).unwrap();
                backend.write(&mut to, &vec![7.0; (rows + 1) * COLS]).unwrap();
                let ones = backend.vector(&[1.0; COLS]).unwrap();
                let mut made = 0;
                let mut map = |from: &Buffer, to: &mut Buffer, rows: std::ops::Range<usize>| {
                    made += rows.len();
                    backend.rms_norm(rows, to, from, &ones, 1e-6);
                };
                collective.reduce_into(backend, rows, &mut from, &mut to, &mut map).unwrap();
                assert_eq!(made < rows, is_shared, "{made} of {rows} rows by {rank} of {size}");

                let mut whole = backend.output(rows, COLS).unwrap();
                backend.write(&mut whole, &sum(rank.world().ranks(), 0, rows * COLS)).unwrap();
                let mut want = backend.buffer(rows, COLS).unwrap();
                backend.rms_norm(0..rows, &mut want, &whole, &ones, 1e-6);
                let [mut got, mut logit_rows] = [vec![0.0; (rows + 1) * COLS], vec![0.0; rows * COLS]];
                backend.read(&to, 0..rows + 1, &mut got).unwrap();
                backend.read(&want, 0..rows, &mut logit_rows).unwrap();
                assert_eq!(bits(&got[..rows * COLS]), bits(&logit_rows), "{rank} of {size}");
                assert!(got[rows * COLS..].iter().all(|&value| value == 7.0), "rows after them stay");
            });
        }
    });
}

#[test]
fn a_rank_that_leaves_before_or_between_the_halves_of_shared_rows_is_noticed() {
    const ROWS: usize = 64;
    const COLS: usize = 1024;
    for halves in 0..2 {
        watched(move || {
            let group = Group::new(2, ROWS * COLS);
            let [staying, mut leaving] = [group.comm(0), group.comm(1)];
            let at_work = Barrier::new(2);
            std::thread::scope(|scope| {
                let at_work = &at_work;
                scope.spawn(move || {
                    if halves == 1 {
                        leaving.reduce_scatter_rows(COLS, &mut vec![1.0; ROWS * COLS]).unwrap();
                        at_work.wait();
                    }
                });
                let (collective, backend) =
                    (GroupCollective::over(staying), CpuBackend::new(CpuOptions::default()).unwrap());
                let [mut from, mut to] = [backend.output(ROWS, COLS).unwrap(), backend.output(ROWS, COLS).unwrap()];
                let mut made = 0;
                let mut map = |_: &Buffer, _: &mut Buffer, rows: std::ops::Range<usize>| {
                    made += rows.len();
                    at_work.wait();
                };
                let ended = collective.reduce_into(&backend, ROWS, &mut from, &mut to, &mut map);
                assert!(matches!(ended, Err(CollectiveError::Lost(rank)) if rank.index() == 1), "{ended:?}");
                assert_eq!(made, halves * ROWS / 2);
            });
        });
    }
}

/// The rows of a rank of three after `exchange`. There are more rows than the segment holds at once.
fn exchanged(
    exchange: impl Fn(&dyn Collective<CpuBackend>, &CpuBackend, &mut Buffer) + Sync,
    check: impl Fn(Rank, &[f32]) + Sync,
) {
    all(3, |collective, backend, rank| {
        let mut buffer = backend.buffer(MANY, COLS).unwrap();
        backend.write(&mut buffer, &numbers(rank, 0, MANY * COLS)).unwrap();
        exchange(collective, backend, &mut buffer);
        let mut after = vec![0.0; MANY * COLS];
        backend.read(&buffer, 0..MANY, &mut after).unwrap();
        check(rank, &after);
    });
}

#[test]
fn rows_beyond_a_segment_are_exchanged_in_pieces_with_the_same_bits() {
    watched(|| {
        exchanged(
            |collective, backend, buffer| collective.all_reduce(backend, MANY, buffer).unwrap(),
            |rank, after| assert_eq!(bits(after), bits(&sum(rank.world().ranks(), 0, MANY * COLS))),
        );
        all(3, |collective, backend, rank| gather(collective, backend, rank, MANY));
    });
}

#[test]
fn a_row_beyond_a_segment_is_refused() {
    watched(|| {
        all(2, |collective, backend, _| {
            let mut buffer = backend.buffer(1, 3 * COLS + 1).unwrap();
            let Err(CollectiveError::Transport(error)) = collective.all_reduce(backend, 1, &mut buffer) else {
                panic!("too large")
            };
            let error = error.downcast_ref::<CommError>().unwrap();
            assert_eq!(*error, CommError::TooLarge { elements: 34, elements_max: 33 });
        });
    });
}

#[test]
fn a_rank_that_left_is_named_as_lost() {
    watched(|| {
        all(2, |collective, backend, rank| {
            if rank.index() == 0 {
                let mut buffer = backend.buffer(1, COLS).unwrap();
                let error = collective.all_reduce(backend, 1, &mut buffer).unwrap_err();
                assert!(matches!(error, CollectiveError::Lost(lost) if lost.index() == 1), "{error}");
            }
        });
    });
}
