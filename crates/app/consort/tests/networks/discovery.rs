//! `consort plan` on a network where machines announce themselves.

use tempfile::TempDir;

use testing::joined_node::{JoinedNode, KEY};
use testing::network::{Network, address};
use testing::serving::{consort, text};
use testing::watchdog::watched;
use testing::{bounded, oracle};

#[test]
fn two_clusters_in_one_network_find_their_own_machines() {
    watched(|| {
        let Some(network) = Network::new(3) else { return };
        const OTHER_KEY: &str = "another passphrase of the tests";
        let join = |index, name, key| {
            let listen = format!("{}:7420", address(index));
            network.within(index, || JoinedNode::start_at(&listen, key, &["--name", name]))
        };
        let nodes = [join(1, "attic", KEY), join(2, "cellar", OTHER_KEY), join(3, "loft", OTHER_KEY)];
        let (cache, model) = (TempDir::new().unwrap(), oracle("qwen3/model-f32"));
        let plan = |key| {
            let output = network.within(0, || {
                let mut command = consort(&["plan", model.to_str().unwrap(), "--cluster-key", key]);
                bounded::output(command.env("XDG_CACHE_HOME", cache.path()))
            });
            assert!(output.status.success(), "{}", text(&output.stderr));
            (text(&output.stdout), text(&output.stderr))
        };
        for (key, own, others, note) in [
            (
                KEY,
                &["attic"][..],
                &["cellar", "loft"][..],
                "2 machines here are of other clusters: they have other keys",
            ),
            (OTHER_KEY, &["cellar", "loft"], &["attic"], "one machine here is of another cluster: it has another key"),
        ] {
            let (table, notes) = plan(key);
            let has = |name: &&str| table.lines().any(|line| line.starts_with(&format!("{name} ")));
            assert!(own.iter().all(has) && !others.iter().any(has), "{table}");
            assert!(notes.contains(note), "{notes}");
            for word in ["refused", "fail", "error"] {
                assert!(!table.contains(word) && !notes.contains(word), "{table}{notes}");
            }
        }
        drop(nodes);
    });
}
