//! `Hosts`: the other machines that run ranks, and how the ranks of a group learn each other's addresses.
//!
//! Rank 0 runs on the supervisor's machine, the others one on each host. A group is formed in two rounds: every rank
//! opens a port, and then every rank gets the addresses of all. The supervisor takes a host's address, and the address
//! under which that host sees this machine, from the connection of its rank stream.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use net::ClusterKey;
use rustix::rand::{GetRandomFlags, getrandom};

use super::deadlines::Deadlines;
use super::member::{Expected, Member, MemberPhase};
use super::supervisor::Group;
use crate::protocol::RankRequest;
use crate::protocol::join::{Activations, JoinTimeouts, Secret};

/// Where all ranks but rank 0 run.
#[derive(Clone, Debug)]
pub struct Hosts {
    /// `NAME:PORT` of each, where it [serves ranks](crate::remote::serve_ranks).
    pub addresses: Vec<String>,
    pub key: ClusterKey,
    pub activations: Activations,
}

/// The addresses of this machine and of a host, as the connection between them has them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Route {
    pub own: IpAddr,
    pub theirs: IpAddr,
}

impl Group {
    /// The first round: every rank opens a port.
    pub(super) fn request_listen(&mut self) {
        for index in 0..self.members.len() {
            self.members[index].phase = MemberPhase::ListenRequested;
            let host = self.own_address(index);
            self.ask(index, |id| RankRequest::Listen { id, host }, Expected::Listening);
        }
    }

    /// The second round: every rank gets the addresses of all.
    pub(super) fn request_join(&mut self, activations: Activations) {
        let mut key = [0; 32];
        let filled = getrandom(&mut key, GetRandomFlags::empty());
        if filled != Ok(key.len()) {
            return; // interrupted: the next iteration tries again
        }
        let Some(epoch) = self.begin_epoch() else { return };
        let (world_size, timeouts) = (self.config.world.get() as u16, timeouts(&self.config.deadlines));
        for index in 0..self.members.len() {
            self.members[index].phase = MemberPhase::Joining;
            let rank = self.members[index].rank.index() as u16;
            let (addresses, key) = (addresses(&self.members, index).into(), Secret::new(key));
            let join = |id| RankRequest::Join {
                id,
                world_size,
                rank,
                epoch: epoch.0,
                addresses,
                key,
                encoding: activations,
                timeouts,
            };
            self.ask(index, join, Expected::Attached);
        }
    }

    /// The address on which a rank listens. For rank 0 it is the address under which all hosts see this machine, if
    /// they agree.
    fn own_address(&self, index: usize) -> IpAddr {
        if let Some(route) = route(&self.members, index) {
            return route.theirs;
        }
        let mut routes = (1..self.members.len()).filter_map(|index| route(&self.members, index)).map(|route| route.own);
        let first = routes.next();
        first.filter(|&first| routes.all(|own| own == first)).unwrap_or(Ipv6Addr::UNSPECIFIED.into())
    }
}

/// How long ranks wait for each other. Connecting: less than the supervisor waits, so that it gets their errors. Within
/// a collective: more, since the supervisor knows better which rank is at fault.
fn timeouts(deadlines: &Deadlines) -> JoinTimeouts {
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
