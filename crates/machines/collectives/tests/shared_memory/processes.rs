//! Ranks as processes: the test binary starts itself again, and the child inherits the segment as standard input.

use std::os::fd::AsFd;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::channel;
use std::thread;

use collectives::shared_memory::{Epoch, GroupLimits, Segment, ShmComm};
use collectives::{CommError, Communicator as _};
use types::WorldSize;

use testing::shared_memory_group::{Group, bits, numbers, sum};
use testing::watchdog::watched;

/// Set for a child: its rank and its epoch.
const PART: &str = "CONSORT_TEST_PART";
const WORLD: u16 = 3;
const ELEMENTS: usize = 20_011;

/// Starts the test `name` of this binary again, as a rank.
fn spawn(group: &Group, name: &str, rank: u16, epoch: Epoch) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name])
        .env(PART, format!("{rank} {epoch}"))
        .stdin(Stdio::from(group.fd()))
        .stdout(Stdio::null())
        .spawn()
        .unwrap()
}

/// The communicator of this process, if it is a child.
fn inherited() -> Option<ShmComm> {
    let part = std::env::var(PART).ok()?;
    let (rank, epoch) = part.split_once(' ').unwrap();
    let limits = GroupLimits { world: WorldSize::new(WORLD).unwrap(), elements_max: ELEMENTS };
    let segment = Segment::attach(std::io::stdin().as_fd().try_clone_to_owned().unwrap(), limits).unwrap();
    let rank = limits.world.rank(rank.parse().unwrap()).unwrap();
    Some(segment.join(rank, Epoch(epoch.parse().unwrap())).unwrap())
}

fn exchange(comm: &mut ShmComm, op: usize) -> Result<(), CommError> {
    let len = [1, 33, 576, ELEMENTS][op % 4];
    let mut values = numbers(comm.rank(), op, len);
    comm.all_reduce(&mut values)?;
    assert_eq!(bits(&values), bits(&sum(comm.rank().world().ranks(), op, len)), "operation {op}");
    Ok(())
}

#[test]
fn processes_sum_like_threads() {
    const OPS: usize = 200;
    watched(|| {
        let run = |mut comm: ShmComm| (0..OPS).for_each(|op| exchange(&mut comm, op).unwrap());
        if let Some(comm) = inherited() {
            return run(comm);
        }
        let group = Group::new(WORLD, ELEMENTS);
        let comm = group.comm(0);
        let children = [1, 2].map(|rank| spawn(&group, "processes::processes_sum_like_threads", rank, comm.epoch()));
        run(comm);
        for mut child in children {
            assert!(child.wait().unwrap().success());
        }
    });
}

#[test]
fn a_killed_process_is_lost_and_the_group_works_again_when_formed_anew() {
    const NAME: &str = "processes::a_killed_process_is_lost_and_the_group_works_again_when_formed_anew";
    watched(|| {
        let until_lost = |comm: &mut ShmComm, each: &dyn Fn(usize)| {
            let ended = (0..).try_for_each(|op| exchange(comm, op).map(|()| each(op)));
            ended.expect_err("only an error ends it")
        };
        if let Some(mut comm) = inherited() {
            assert_eq!(until_lost(&mut comm, &|_| ()), CommError::Lost(comm.rank().world().rank(2).unwrap()));
            return;
        }
        let group = Group::new(WORLD, ELEMENTS);
        for _ in 0..2 {
            let mut comm = group.comm(0);
            let epoch = comm.epoch();
            let [mut survivor, mut victim] = [1, 2].map(|rank| spawn(&group, NAME, rank, epoch));
            let (progress, is_running) = channel();
            let own = thread::spawn(move || {
                until_lost(&mut comm, &|op| {
                    // The receiver is dropped after the first operations, so the error is ignored.
                    let _ = progress.send(op);
                })
            });
            assert_eq!(is_running.iter().nth(10), Some(10));
            victim.kill().unwrap();
            assert!(!victim.wait().unwrap().success());
            group.segment.abort(epoch).lost(group.rank(2));
            assert_eq!(own.join().unwrap(), CommError::Lost(group.rank(2)));
            assert!(survivor.wait().unwrap().success());
            assert!(group.segment.begin_epoch().unwrap() > epoch);
        }
    });
}
