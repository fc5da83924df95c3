//! A seat as the collective of a backend. The segment holds three rows.

use std::sync::{Barrier, Mutex};

use cluster::Exchange;
use cluster::shared_memory::GroupError;
use kernels::cpu::{Buffer, CpuBackend, CpuOptions};
use kernels::{Backend, MatrixSource, Rows};
use model::{Collective, CollectiveError, Rooms};
use types::{DType, Rank, WorldSize};

use crate::group::{Group, bits, numbers, sum, watched};

const ROWS: usize = 4;
const COLS: usize = 11;
const MANY: usize = 10;

/// Runs `part` as every rank with a collective and a backend of its own.
fn all(size: u16, part: impl Fn(&dyn Collective<CpuBackend>, &CpuBackend, Rank) + Sync) {
    within(Group::new(size, 3 * COLS), part);
}

fn within(group: Group, part: impl Fn(&dyn Collective<CpuBackend>, &CpuBackend, Rank) + Sync) {
    let seats = Mutex::new(group.limits.world.ranks().map(|rank| group.seat(rank.index() as u16)).collect::<Vec<_>>());
    std::thread::scope(|scope| {
        for _ in group.limits.world.ranks() {
            scope.spawn(|| {
                let exchange = Exchange::new(seats.lock().unwrap().pop().unwrap());
                // With one thread, or several that share the sums and copies.
                let threads = 1 + exchange.rank().index() % 2 * 2;
                let backend = CpuBackend::new(CpuOptions { threads, ..CpuOptions::default() }).unwrap();
                part(&exchange, &backend, exchange.rank());
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

#[test]
fn a_buffer_is_gathered_by_the_shares_of_the_ranks_and_broadcast_from_a_root() {
    watched(|| {
        all(3, |collective, backend, rank| {
            let mut buffer = backend.buffer(2, COLS).unwrap();
            backend.write(&mut buffer, &numbers(rank, 0, 2 * COLS)).unwrap();
            collective.all_gather(backend, 2, &mut buffer).unwrap();
            let mut after = vec![0.0; 2 * COLS];
            backend.read(&buffer, 0..2, &mut after).unwrap();
            for owner in rank.world().ranks() {
                for column in owner.share(COLS).flat_map(|column| [column, COLS + column]) {
                    assert_eq!(after[column].to_bits(), numbers(owner, 0, 2 * COLS)[column].to_bits());
                }
            }
            let root = rank.world().rank(1).unwrap();
            let mut buffer = backend.buffer(1, COLS).unwrap();
            backend.write(&mut buffer, &numbers(rank, 1, COLS)).unwrap();
            collective.broadcast(backend, root, 1, &mut buffer).unwrap();
            let mut after = vec![0.0; COLS];
            backend.read(&buffer, 0..1, &mut after).unwrap();
            assert_eq!(bits(&after), bits(&numbers(root, 1, COLS)));
        });
    });
}

#[test]
fn rows_that_are_made_from_sums_are_shared_when_there_are_many_and_are_the_same_everywhere() {
    const COLS: usize = 1024;
    watched(|| {
        // Of the pieces of 64 rows the last is short: too short to be shared, or not. No rank has its rows in its room, or one, or all.
        let groups = [(1, 130, false), (2, 130, true), (3, 100, true), (2, 5, false)];
        for ((size, rows, is_shared), in_rooms) in
            groups.into_iter().flat_map(|group| [0, 1, 3].map(|in_rooms| (group, in_rooms)))
        {
            let (size, rows): (u16, usize) = (size, rows);
            within(Group::new(size, 64 * COLS), |collective, backend, rank| {
                let mut from = backend.output(rows + 1, COLS).unwrap();
                let mut to = backend.buffer(rows + 1, COLS).unwrap();
                if rank.index() < in_rooms {
                    let Rooms { brought, made } = collective.rooms().unwrap();
                    backend.share_rows(&mut from, brought);
                    backend.share_rows(&mut to, made);
                    assert!(collective.rooms().is_none(), "rooms are given once");
                }
                backend.write(&mut from, &numbers(rank, 0, (rows + 1) * COLS)).unwrap();
                backend.write(&mut to, &vec![7.0; (rows + 1) * COLS]).unwrap();
                let ones = backend.vector(&[1.0; COLS]).unwrap();
                let mut made = 0;
                let mut each = |from: &Buffer, to: &mut Buffer, rows: std::ops::Range<usize>| {
                    made += rows.len();
                    backend.rms_norm(rows, to, from, &ones, 1e-6);
                };
                collective.reduce_into(backend, Rows::prompt(rows), &mut from, &mut to, None, &mut each).unwrap();
                assert_eq!(made < rows, is_shared, "{made} of {rows} rows by {rank} of {size}");

                let mut whole = backend.output(rows, COLS).unwrap();
                backend.write(&mut whole, &sum(rank.world().ranks(), 0, rows * COLS)).unwrap();
                let mut want = backend.buffer(rows, COLS).unwrap();
                backend.rms_norm(0..rows, &mut want, &whole, &ones, 1e-6);
                let [mut got, mut wanted] = [vec![0.0; (rows + 1) * COLS], vec![0.0; rows * COLS]];
                backend.read(&to, 0..rows + 1, &mut got).unwrap();
                backend.read(&want, 0..rows, &mut wanted).unwrap();
                assert_eq!(bits(&got[..rows * COLS]), bits(&wanted), "{rank} of {size}");
                assert!(got[rows * COLS..].iter().all(|&value| value == 7.0), "rows after them stay");
            });
        }
    });
}

#[test]
fn a_matrix_reads_of_shared_rows_what_it_would_read_of_all_of_them() {
    const COLS: usize = 1024 + 32;
    const FEATURES: usize = 40;
    watched(|| {
        let weights: Vec<u8> = numbers(WorldSize::ONE.rank(0).unwrap(), 5, FEATURES * COLS)
            .into_iter()
            .flat_map(f32::to_le_bytes)
            .collect();
        let (dtype, row_stride, bytes) = (DType::F32, 4 * COLS, &weights[..]);
        // Prompts alone, the last of their bundles not whole; with generated tokens before them; generated tokens alone.
        let steps = [Rows::prompt(130), Rows::prompt(96), Rows { generated: 5, prompt: 70 }, Rows::generated(64)];
        for keep in [DType::F32, DType::BF16, DType::Q8_0] {
            // In the third group no bundle of each rank fits at once.
            let groups: [(u16, usize); 3] = [(2, 1 << 20), (3, 1 << 20), (2, 20 * COLS)];
            let cases = groups.into_iter().flat_map(|group| steps.map(|rows| (group, rows)));
            for (((size, room), rows), in_rooms) in cases.flat_map(|case| [0, 1, 3].map(|in_rooms| (case, in_rooms))) {
                within(Group::new(size, room), |collective, backend, rank| {
                    let source = MatrixSource { dtype, rows: FEATURES, cols: COLS, row_stride, bytes, keep };
                    let (matrix, all) = (backend.matrix(&[source]).unwrap(), rows.all());
                    let ones = backend.vector(&[1.0; COLS]).unwrap();
                    let mut each = |from: &Buffer, to: &mut Buffer, made| {
                        let mut sums = backend.output(all, COLS).unwrap();
                        backend.norm_for(rows, made, to, &mut sums, Some(from), &ones, 1e-6, Some(&matrix));
                    };
                    let mut from = backend.output(all, COLS).unwrap();
                    let [got, want] = [true, false].map(|is_shared| {
                        let mut to = backend.buffer(all, COLS).unwrap();
                        if is_shared {
                            // No rank makes its rows in its room, or one, or all.
                            if rank.index() < in_rooms {
                                backend.share_form(&mut to, &matrix, collective.rooms().unwrap().made);
                            }
                            backend.write(&mut from, &numbers(rank, 0, all * COLS)).unwrap();
                            collective
                                .reduce_into(backend, rows, &mut from, &mut to, Some(&matrix), &mut each)
                                .unwrap();
                        } else {
                            backend.write(&mut from, &sum(rank.world().ranks(), 0, all * COLS)).unwrap();
                            each(&from, &mut to, 0..all);
                        }
                        let (mut out, mut values) = (backend.output(all, FEATURES).unwrap(), vec![0.0; all * FEATURES]);
                        backend.linear(rows, &mut out, &to, &matrix, None);
                        backend.read(&out, 0..all, &mut values).unwrap();
                        values
                    });
                    assert_eq!(bits(&got), bits(&want), "{rows:?} of {keep:?}, {rank}");
                });
            }
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
            let [staying, mut leaving] = [group.seat(0), group.seat(1)];
            let at_work = Barrier::new(2);
            std::thread::scope(|scope| {
                let at_work = &at_work;
                scope.spawn(move || {
                    if halves == 1 {
                        leaving.bring_rows(0, COLS, &mut vec![1.0; ROWS * COLS]).unwrap();
                        at_work.wait();
                    }
                });
                let (exchange, backend) = (Exchange::new(staying), CpuBackend::new(CpuOptions::default()).unwrap());
                let [mut from, mut to] = [backend.output(ROWS, COLS).unwrap(), backend.output(ROWS, COLS).unwrap()];
                let mut made = 0;
                let mut each = |_: &Buffer, _: &mut Buffer, rows: std::ops::Range<usize>| {
                    made += rows.len();
                    at_work.wait();
                };
                let ended = exchange.reduce_into(&backend, Rows::prompt(ROWS), &mut from, &mut to, None, &mut each);
                assert!(matches!(ended, Err(CollectiveError::Lost(rank)) if rank.index() == 1), "{ended:?}");
                assert_eq!(made, halves * ROWS / 2);
            });
        });
    }
}

/// What a rank of three has after `exchange` of all rows that it filled, several segments full of them.
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
        exchanged(
            |collective, backend, buffer| collective.all_gather(backend, MANY, buffer).unwrap(),
            |rank, after| {
                for owner in rank.world().ranks() {
                    let brought = numbers(owner, 0, MANY * COLS);
                    for index in (0..MANY * COLS).filter(|index| owner.share(COLS).contains(&(index % COLS))) {
                        assert_eq!(after[index].to_bits(), brought[index].to_bits());
                    }
                }
            },
        );
        let root = WorldSize::new(3).unwrap().rank(2).unwrap();
        exchanged(
            |collective, backend, buffer| collective.broadcast(backend, root, MANY, buffer).unwrap(),
            |_, after| assert_eq!(bits(after), bits(&numbers(root, 0, MANY * COLS))),
        );
    });
}

#[test]
fn a_row_beyond_a_segment_is_refused() {
    watched(|| {
        all(2, |collective, backend, _| {
            let mut buffer = backend.buffer(1, 3 * COLS + 1).unwrap();
            let Err(CollectiveError::Transport(error)) = collective.all_gather(backend, 1, &mut buffer) else {
                panic!("too large")
            };
            let error = error.downcast_ref::<GroupError>().unwrap();
            assert_eq!(*error, GroupError::TooLarge { elements: 34, elements_max: 33 });
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
