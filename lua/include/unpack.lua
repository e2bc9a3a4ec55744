-- Lua 5.1 (Redis, Valkey) has unpack, later ones (Dragonfly) table.unpack.
local unpack = unpack or table.unpack
