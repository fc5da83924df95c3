//! Names by which people tell nodes apart. A node chooses its own name, which is often that of another machine too.

use std::collections::HashMap;
use std::net::SocketAddr;

/// Characters of a name that several nodes have: what tells them apart comes after it, and has to be seen.
const NAME_CHARS_MAX: usize = 12;

/// The names for nodes with these names and addresses: those that several nodes have are followed by the node's address. The
/// port is left out where the rest tells them apart.
pub fn distinct_names(nodes: &[(&str, SocketAddr)]) -> Vec<String> {
    let mut namesakes: HashMap<&str, Vec<SocketAddr>> = HashMap::new();
    for (name, address) in nodes {
        namesakes.entry(name).or_default().push(*address);
    }
    let distinct = |(name, address): &(&str, SocketAddr)| {
        let others = || namesakes[name].iter().filter(|other| *other != address);
        match (others().next(), others().any(|other| other.ip() == address.ip())) {
            (None, _) => (*name).to_owned(),
            (Some(_), false) => format!("{} ({})", shortened(name), address.ip()),
            (Some(_), true) => format!("{} ({address})", shortened(name)),
        }
    };
    nodes.iter().map(distinct).collect()
}

fn shortened(name: &str) -> String {
    name.chars().take(NAME_CHARS_MAX).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(nodes: &[(&str, &str)], expected: &[&str]) {
        let nodes: Vec<_> = nodes.iter().map(|(name, address)| (*name, address.parse().unwrap())).collect();
        assert_eq!(distinct_names(&nodes), expected);
    }

    #[test]
    fn nodes_with_the_same_name_have_their_address_in_it() {
        check(&[("attic", "10.0.0.2:7420"), ("kitchen", "10.0.0.3:7420")], &["attic", "kitchen"]);
        check(
            &[("mac", "10.0.0.2:7420"), ("kitchen", "10.0.0.3:7420"), ("mac", "10.0.0.4:7420")],
            &["mac (10.0.0.2)", "kitchen", "mac (10.0.0.4)"],
        );
        check(
            &[("mac", "10.0.0.2:7420"), ("mac", "10.0.0.2:7421"), ("mac", "[fe80::1]:7420")],
            &["mac (10.0.0.2:7420)", "mac (10.0.0.2:7421)", "mac (fe80::1)"],
        );
        let long = "m".repeat(63);
        let shown = ["10.0.0.2", "10.0.0.3"].map(|ip| format!("{} ({ip})", &long[..NAME_CHARS_MAX]));
        check(&[(&long, "10.0.0.2:1"), (&long, "10.0.0.3:1")], &[&shown[0], &shown[1]]);
        check(&[], &[]);
    }
}
