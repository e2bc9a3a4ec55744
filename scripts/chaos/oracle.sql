-- What chaos keeps beside the ledger: the application's own tables, and a record of every change of a ledger row, made by a
-- trigger. The trigger sees what really happened to a row, in order, whatever the code that changed it believes.
create schema chaos;
create table chaos.orders (task text primary key);
create table chaos.effect (task text not null, delivery int not null);
create table chaos.stock (part int primary key, taken int not null);
insert into chaos.stock select part, 0 from generate_series(0, 63) part;
create table chaos.change (
	n bigint generated always as identity, at timestamptz not null, task bytea not null,
	old_status delayq.status, new_status delayq.status, old_token uuid, new_token uuid, old_until timestamptz,
	old_delivery int, new_delivery int, old_lost int, new_lost int, old_by text, new_by text
);

create function chaos.note() returns trigger language plpgsql as $$
begin
	insert into chaos.change (at, task, old_status, new_status, old_token, new_token, old_until, old_delivery, new_delivery,
		old_lost, new_lost, old_by, new_by)
	values (clock_timestamp(), new.id, old.status, new.status, old.token, new.token, old.locked_until, old.deliveries, new.deliveries,
		old.lost, new.lost, old.locked_by, new.locked_by);
	return null;
end $$;
-- Not for heartbeats, which change only locked_until.
create trigger chaos_update after update on delayq.task for each row
	when (old.status is distinct from new.status or old.token is distinct from new.token or old.deliveries <> new.deliveries)
	execute function chaos.note();
