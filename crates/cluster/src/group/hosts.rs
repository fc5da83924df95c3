//! `Hosts`: the other machines whose ranks take part, and how a group finds itself there.
//!
//! The first rank runs beside the supervisor, the others one on each host. A group is called together in two rounds: all ranks
//! open a port, and then each is told where the others have theirs. The supervisor knows the way to a host, and how that host sees
//! this machine, from the connection that carries its lines.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use rustix::rand::{GetRandomFlags, getrandom};

use super::deadlines::Deadlines;
use super::member::{Expected, Member, Phase};
use super::supervisor::Group;
use crate::protocol::Request;
use crate::protocol::join::{Activations, JoinTimeouts, Secret};
use crate::tcp::ClusterKey;

/// Where the ranks above the first run.
#[derive(Clone, Debug)]
pub struct Hosts {
    /// `NAME:PORT` of each, where it [serves ranks](crate::tcp::serve_ranks).
    pub addresses: Vec<String>,
    pub key: ClusterKey,
    pub activations: Activations,
}

/// How this machine and a host see each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Route {
    pub own: IpAddr,
    pub theirs: IpAddr,
}

impl Group {
    /// The first round: everybody opens a port.
    pub(super) fn call_to_listen(&mut self) {
        for index in 0..self.members.len() {
            self.members[index].phase = Phase::Calling;
            let host = self.own_address(index);
            self.ask(index, |id| Request::Listen { id, host }, Expected::Listening);
        }
    }

    /// The second: everybody is told of the others' ports.
    pub(super) fn call_to_join(&mut self, activations: Activations) {
        let mut key = [0; 32];
        let filled = getrandom(&mut key, GetRandomFlags::empty());
        if filled != Ok(key.len()) {
            return; // interrupted: the next turn tries again
        }
        let Some(epoch) = self.begin_generation() else { return };
        let (world_size, patience) = (self.config.world.get() as u16, patience(&self.config.deadlines));
        for index in 0..self.members.len() {
            self.members[index].phase = Phase::Joining;
            let rank = self.members[index].rank.index() as u16;
            let (addresses, key) = (addresses(&self.members, index), Secret::new(key));
            let join = |id| Request::Join {
                id,
                world_size,
                rank,
                epoch: epoch.0,
                addresses,
                key,
                encoding: activations,
                patience,
            };
            self.ask(index, join, Expected::Attached);
        }
    }

    /// Where a rank is to listen: for the first one, where all hosts see this machine, if they agree.
    fn own_address(&self, index: usize) -> IpAddr {
        if let Some(route) = route(&self.members, index) {
            return route.theirs;
        }
        let mut routes = (1..self.members.len()).filter_map(|index| route(&self.members, index)).map(|route| route.own);
        let first = routes.next();
        first.filter(|&first| routes.all(|own| own == first)).unwrap_or(Ipv6Addr::UNSPECIFIED.into())
    }
}

/// How long ranks wait for each other: to connect for less than the supervisor waits, who then learns what was wrong, and within an
/// exchange for more, since the supervisor knows better who is to blame.
fn patience(deadlines: &Deadlines) -> JoinTimeouts {
    let ms = |wait: Duration| wait.as_millis() as u64;
    JoinTimeouts {
        connect_ms: ms(deadlines.join / 3),
        stall_ms: ms(deadlines.step + deadlines.step / 2),
        silence_ms: ms(deadlines.silent),
    }
}

/// All ranks' addresses, as the rank at `index` reaches them.
fn addresses(members: &[Member], index: usize) -> Vec<SocketAddr> {
    let own = route(members, index).or_else(|| route(members, 1)).map(|route| route.own);
    let ip =
        |other: usize| route(members, other).map(|route| route.theirs).or(own).unwrap_or(Ipv6Addr::LOCALHOST.into());
    members.iter().enumerate().map(|(other, member)| SocketAddr::new(ip(other), member.port)).collect()
}

fn route(members: &[Member], index: usize) -> Option<Route> {
    members.get(index)?.process.as_ref()?.route()
}
