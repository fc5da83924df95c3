//! Any text is a saved plan, a topology of cake's, the values of an announcement, or an error; within bounded memory. What was
//! read is written and read again without a change.
#![no_main]

use cluster::discovery::Announcement;
use libfuzzer_sys::fuzz_target;
use plan::{CakeTopology, LAYERS_MAX, SavedPlan};

const BASE_BYTES: usize = 4 << 20;
/// A parser keeps an event or a value for each few bytes.
const BYTES_PER_BYTE: usize = 256;

fuzz_target!(
    init: fuzz::plant("plan_files", &fuzz::seed_files("plan_files")),
    |input: &[u8]| fuzz::within_bytes(BASE_BYTES + BYTES_PER_BYTE * input.len(), || read_any(input))
);

fn read_any(input: &[u8]) {
    announcement(input);
    let Ok(text) = str::from_utf8(input) else { return };
    if let Ok(plan) = SavedPlan::parse(text) {
        reads_back(&plan);
    }
    let Ok(topology) = CakeTopology::parse(text) else { return };
    for layers in [1, 28, LAYERS_MAX] {
        if let Ok(Some(plan)) = topology.plan("model", layers) {
            assert_eq!(plan.layers, layers);
            reads_back(&plan);
        }
    }
}

fn reads_back(plan: &SavedPlan) {
    let text = plan.to_string();
    let again = SavedPlan::parse(&text).expect("what was written is read");
    assert_eq!(again.to_string(), text);
}

/// The lines are the values of version, key and name.
fn announcement(input: &[u8]) {
    let mut lines = input.split(|byte| *byte == b'\n');
    let values = [lines.next(), lines.next(), lines.next()];
    let value = |key| ["v", "key", "name"].iter().position(|name| *name == key).and_then(|index| values[index]);
    if let Ok(announcement) = Announcement::from_txt(value) {
        let fields = announcement.txt();
        let again = Announcement::from_txt(|key| {
            fields.iter().find(|(name, _)| *name == key).map(|(_, value)| value.as_bytes())
        });
        assert_eq!(again, Ok(announcement));
    }
}
