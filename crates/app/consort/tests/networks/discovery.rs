//! `consort plan` on a network where machines announce themselves.

use tempfile::TempDir;

use testing::joined_node::{JoinedNode, KEY};
use testing::network::{Network, address};
use testing::serving::{consort, text};
use testing::watchdog::watched;
use testing::{bounded, oracle};

#[test]
fn a_plan_has_the_machines_that_announce_themselves_and_says_which_have_another_key() {
    watched(|| {
        let Some(network) = Network::new(2) else { return };
        let join = |index, name, key| {
            let listen = format!("{}:7420", address(index));
            network.within(index, || JoinedNode::start_at(&listen, key, &["--name", name]))
        };
        let _nodes = [join(1, "attic", KEY), join(2, "stranger", "another passphrase of the tests")];
        let (cache, model) = (TempDir::new().unwrap(), oracle("qwen3/model-f32"));
        let output = network.within(0, || {
            let mut command = consort(&["plan", model.to_str().unwrap(), "--cluster-key", KEY]);
            bounded::output(command.env("XDG_CACHE_HOME", cache.path()))
        });
        let table = text(&output.stdout);
        assert!(output.status.success(), "{}", text(&output.stderr));
        assert!(table.lines().any(|line| line.starts_with("attic ")), "{table}");
        let stranger = format!("not used: stranger ({}:7420): it has another cluster key\n", address(2));
        assert!(table.ends_with(&stranger), "{table}");
    });
}
