//! What a coordinator has sent to nodes does not stay in its memory.

use std::path::Path;
use std::time::{Duration, Instant};
use std::{fs, thread};

use tempfile::TempDir;
use testing::cluster_chain::DEADLINE;

use crate::loopback::oracle_models;
use crate::nodes::{TestNode, chain, coordinator, key, used};

/// Bytes of the files of a folder that this process has in memory by mapping them.
fn resident(folder: &Path) -> u64 {
    let maps = fs::read_to_string("/proc/self/smaps").unwrap();
    let (mut is_ours, mut sum) = (false, 0);
    for line in maps.lines() {
        let mut words = line.split_whitespace();
        match words.next() {
            Some("Rss:") if is_ours => sum += words.next().unwrap().parse::<u64>().unwrap() << 10,
            Some(first) if !first.ends_with(':') => is_ours = line.contains(folder.to_str().unwrap()),
            _ => {}
        }
    }
    sum
}

#[test]
fn weights_that_were_sent_do_not_stay_in_the_coordinators_memory() {
    // A copy, so that no other test maps the same files.
    let (model, copy) = (oracle_models().remove(0), TempDir::new().unwrap());
    for entry in fs::read_dir(&model).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), copy.path().join(entry.file_name())).unwrap();
    }
    let stores = [(); 2].map(|()| TempDir::new().unwrap());
    let nodes: Vec<_> = stores.iter().map(|store| TestNode::start("node", key("one"), store.path(), None)).collect();
    let peers: Vec<_> = nodes.iter().map(|node| node.address).collect();
    let chain = chain(coordinator(copy.path(), key("one"), &peers, Some(&[1, 1]), u64::MAX >> 1));
    assert_eq!(used(&chain), peers);
    // The threads that send end in a moment.
    let end = Instant::now() + DEADLINE;
    while resident(copy.path()) > 0 {
        assert!(Instant::now() < end, "{} bytes", resident(copy.path()));
        thread::sleep(Duration::from_millis(10));
    }
}
